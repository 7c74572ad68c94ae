"""The graph of layers: what waits while one of them runs backward."""

from __future__ import annotations

from plan_cases import residual_net

from pdmpi.graph import Layer, LayerGraph, Ref, TensorSpec


def test_gradients_that_skip_a_layer_wait_while_it_runs_backward() -> None:
    wide, narrow = TensorSpec(shape=(8, 64)), TensorSpec(shape=(8, 16))
    data = TensorSpec(shape=(8, 256), requires_grad=False)

    def layer(name: str, spec: TensorSpec, *inputs: str) -> Layer:
        return Layer(
            name=name, kind="Linear", inputs=tuple(map(Ref, inputs)), outputs=(spec,),
            parameters=(f"{name}.w",),
        )  # fmt: skip

    graph = LayerGraph(
        (
            Layer(name="x", kind="Input", outputs=(data,)),
            layer("a", wide, "x"), layer("b", narrow, "a"), layer("c", narrow, "b"),
            layer("d", wide, "a", "c"),
        ),
        (Ref("d"), Ref("b")),
    )  # fmt: skip
    waiting = {name: graph.gradient_bytes_over(name) for name in "xabcd"}
    assert waiting == {
        "x": 0,  # data has no gradient
        "a": wide.nbytes,  # of a, from b and d
        "b": wide.nbytes + narrow.nbytes,  # of a, from d; of b, from c and the loss
        "c": wide.nbytes + 2 * narrow.nbytes,  # of a; of b, from the loss; of c
        "d": wide.nbytes + narrow.nbytes,  # of what the model returns
    }


def test_data_and_masks_have_no_gradients() -> None:
    graph = residual_net().graph
    assert [graph.gradient_bytes_over(name) for name in ("image", "mask")] == [0, 0]
