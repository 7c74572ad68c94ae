"""A profile's bytes are exact, its times those of a training step, its cost in Python small."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from pdmpi.cli.profile import command
from pdmpi.config.load import parse_config
from pdmpi.config.run import ModelConfig, RunConfig
from pdmpi.errors import InputError
from pdmpi.graph import Ref
from pdmpi.graph.graph import INPUT
from pdmpi.model.build import build_stage
from pdmpi.model.measure import _arriving_bytes
from pdmpi.model.trace import trace_model
from pdmpi.plan.store import load_profile
from pdmpi.runtime.profiling import profile_run


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 8)
    )


def heavy() -> nn.Module:
    light = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(light[0], nn.Linear(64, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 64), light[1])


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def nothings(count: int = 50) -> nn.Module:
    return nn.Sequential(*(Nothing() for _ in range(count)))


def config(factory: str, shape: list[int], **tables: object) -> RunConfig:
    data = {
        "model": {"factory": f"test_measure:{factory}"},
        "data": {"factory": "test_measure:samples", "args": {"shape": shape}},
        "train": {"minibatch_size": 6, "steps": 1},
        **tables,
    }
    return parse_config(data)


def samples(split: str, shape: list[int], classes: int = 8) -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.randn(12, *shape), torch.arange(12) % classes)


def test_bytes_are_exact() -> None:
    run = config("net", [3, 8, 8], optimizer={"name": "Adam", "args": {"lr": 0.1}}, schedule={
        "name": "gpipe", "microbatches": 2,
    })  # fmt: skip
    profile = profile_run(run, repeats=3, budget_s=0.5)
    assert profile.microbatch_size == 3
    costs = dict(zip((layer.name for layer in profile.graph.layers), profile.costs, strict=True))
    plane = 3 * 8 * 8 * 4
    assert [costs[n].output_bytes for n in ("input", "0", "1", "2", "3", "4")] == [
        3 * plane, 4 * plane, 4 * plane, 4 * plane, 4 * plane, 3 * 8 * 4,
    ]  # fmt: skip
    assert [costs[n].parameter_bytes for n in "01234"] == [4 * (4 * 27 + 4), 32, 0, 0, 4 * (256 * 8 + 8)]
    assert [costs[n].buffer_bytes for n in "01234"] == [0, 4 * 8 + 8, 0, 0, 0]
    # The convolution keeps the image, the norm its input and two vectors of four, the ReLU its
    # output, which is also what the linear layer keeps.
    # The loss, which counts for the last layer, keeps log-probabilities, the target and one number.
    assert [costs[n].saved_bytes for n in "01234"] == [
        3 * plane, 4 * plane + 32, 4 * plane, 0, 3 * 8 * 4 + 3 * 8 + 4,
    ]  # fmt: skip
    # Nobody waits for the image's gradient; a ReLU has no parameters.
    assert [costs[n].split_bytes for n in "01234"] == [0, 4 * plane, 0, 0, 3 * 8 * 4]
    assert profile.optimizer_state_factor == pytest.approx(2.0, abs=1e-3)
    assert 0 < profile.update_s_per_byte < 1e-6
    assert all(cost.forward_s > 0 and cost.backward_s >= 0 for cost in profile.costs[1:])
    assert profile.machine["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("name", "args", "factor"), [("SGD", {"lr": 0.1}, 0.0), ("SGD", {"lr": 0.1, "momentum": 0.9}, 1.0)]
)
def test_optimizer_state(name: str, args: dict[str, float], factor: float) -> None:
    profile = profile_run(config("net", [3, 8, 8], optimizer={"name": name, "args": args}), repeats=3)
    assert profile.optimizer_state_factor == factor


def test_times_are_those_of_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both by the processor time of this thread, which other programs on the machine do not lengthen."""
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    run = config("heavy", [64], train={"minibatch_size": 12, "steps": 1})
    profile = profile_run(run, repeats=8, budget_s=3.0)
    costs = dict(zip((layer.name for layer in profile.graph.layers), profile.costs, strict=True))
    assert costs["2"].forward_s > 5 * costs["0.0"].forward_s
    assert costs["2"].backward_s > 5 * costs["4.0"].backward_s
    traced = trace_model(run.model, torch.zeros(12, 64))
    stage, values = build_stage(traced, traced.graph.index), traced.flatten(torch.randn(12, 64))
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        traced.unflatten(stage(values, 0)).sum().backward()
        seconds.append(time.perf_counter() - start)
    measured = sum(cost.forward_s + cost.backward_s for cost in profile.costs)
    assert 0.2 < measured / statistics.median(seconds) < 5


def test_a_model_that_does_not_fit_is_measured_in_parts() -> None:
    run = config("net", [3, 8, 8])
    told: list[tuple[int, int, str]] = []
    whole = profile_run(run, repeats=3)
    parts = profile_run(run, repeats=3, memory_bytes=1, tell=lambda *done: told.append(done))
    assert told == [(1, 5, "0"), (2, 5, "1"), (3, 5, "2"), (4, 5, "3"), (5, 5, "4")]
    assert parts.graph == whole.graph
    assert [c.saved_bytes for c in parts.costs] == [c.saved_bytes for c in whole.costs]


def fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the shortest of 200 calls."""
    seconds = []
    for _ in range(200):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def test_a_call_costs_little_more_than_its_layers() -> None:
    """1.2 times, as a rule, what the same layers cost as an nn.Sequential."""
    traced = trace_model(ModelConfig(factory="test_measure:nothings"), torch.zeros(2))
    stage, values = build_stage(traced, traced.graph.index), traced.flatten(torch.zeros(2))
    layers = sum(layer.kind != INPUT for layer in traced.graph.layers)
    assert layers == 50
    peer, value = nothings(), torch.zeros(2)
    assert fastest(lambda: stage(values, 0)) < 3 * fastest(lambda: peer(value))


def test_what_cannot_be_profiled_is_said() -> None:
    with pytest.raises(InputError, match="has no parameters; there is nothing to train"):
        profile_run(config("nothings", [3]))
    with pytest.raises(InputError, match="holds 12 samples, a microbatch 64; lower minibatch_size"):
        profile_run(config("net", [3, 8, 8], train={"minibatch_size": 64, "steps": 1}))
    with pytest.raises(InputError, match=r"\[optimizer\].*'Adem'.*did you mean 'Adam'"):
        profile_run(config("net", [3, 8, 8], optimizer={"name": "Adem"}), repeats=3)


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    text = """
        [model]
        factory = "test_measure:net"
        [data]
        factory = "test_measure:samples"
        args = { shape = [3, 8, 8] }
        [train]
        minibatch_size = 4
        steps = 1
    """
    (tmp_path / "run.toml").write_text(text)
    out = tmp_path / "p.h5"
    args = [str(tmp_path / "run.toml"), "-o", str(out), "--repeats", "3", "--device", "cpu"]
    done = CliRunner().invoke(command, [*args, "--json"], catch_exceptions=False)
    printed = json.loads(done.stdout)
    profile = load_profile(out)
    assert printed["microbatch_size"] == profile.microbatch_size == 4
    assert [layer["forward_s"] for layer in printed["layers"]] == [c.forward_s for c in profile.costs]
    assert printed["fingerprint"] == profile.graph.fingerprint
    again = CliRunner().invoke(command, args)
    assert isinstance(again.exception, InputError)
    assert "--force" in str(again.exception)


def test_a_batch_is_counted_as_it_arrives_and_as_it_is_cast() -> None:
    words, pictures = Ref("words"), Ref("pictures")
    given = {words: torch.zeros(6, 10, dtype=torch.long), pictures: torch.zeros(6, 4)}
    cast = {words: given[words], pictures: given[pictures].bfloat16()}
    assert _arriving_bytes(given, cast) == {"words": 6 * 10 * 8, "pictures": 6 * 4 * (4 + 2)}
