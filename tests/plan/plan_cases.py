"""Profiles, clusters and where the reference data may be, for the planner's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmpi.graph import Layer, LayerGraph, Ref, TensorSpec
from pdmpi.plan.profile import LayerCost, Profile

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTERS = REPOSITORY / "configs" / "clusters"
REFERENCE = REPOSITORY.parent / "shared" / "reference"

needs_reference = pytest.mark.skipif(
    not (REFERENCE / "reference_plans.csv").is_file(),
    reason="the PipeDream authors' profiles (../shared/reference), no part of the project, are not here",
)


def residual_net(blocks: int = 4) -> Profile:
    """Convolutions with skips and norms, a classifier with most of the parameters, tied names, two inputs."""
    spec = TensorSpec(shape=(8, 16, 4, 4))
    layers = [
        Layer(name="image", kind="Input", outputs=(TensorSpec(shape=(8, 3, 4, 4), requires_grad=False),)),
        Layer(
            name="mask", kind="Input", outputs=(TensorSpec(shape=(8, 4), dtype="bool", requires_grad=False),)
        ),
    ]
    costs = [LayerCost(forward_s=0.0, backward_s=0.0, output_bytes=o.outputs[0].nbytes) for o in layers]
    last = "image"

    def add(name: str, kind: str, inputs: tuple[str, ...], seconds: float, parameters: int) -> str:
        layers.append(
            Layer(
                name=name,
                kind=kind,
                inputs=tuple(Ref(other) for other in inputs),
                outputs=(spec,),
                parameters=(f"{name}.weight",) if parameters else (),
                trainable=kind != "BatchNorm2d" or name.endswith("0"),
            )
        )
        costs.append(
            LayerCost(
                forward_s=seconds, backward_s=2 * seconds, output_bytes=spec.nbytes,
                parameter_bytes=parameters, buffer_bytes=128 if parameters else 0, saved_bytes=spec.nbytes,
                workspace_bytes=1000,
            )
        )  # fmt: skip
        return name

    for b in range(blocks):
        conv = add(f"block{b}.conv", "Conv2d", (last,), 1e-3, 9216)
        norm = add(f"block{b}.norm{b}", "BatchNorm2d", (conv,), 2e-4, 128)
        last = add(f"add_{b}", "add", (norm, last) if b else (norm,), 1e-5, 0)
    last = add("head", "Linear", (last, "mask"), 5e-4, 4_000_000)
    graph = LayerGraph(tuple(layers), (Ref(last), Ref("block0.conv")), ties=(("head.weight", "head.scale"),))
    return Profile(
        graph=graph,
        costs=tuple(costs),
        microbatch_size=8,
        optimizer_state_factor=1.0,
        update_s_per_byte=1e-11,
        accumulate_s_per_byte=2e-11,
        machine={"host": "é", "cpu": "x"},
    )
