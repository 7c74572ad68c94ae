"""The ranks of tools/bench/slow-network: all contestants on two hosts, in turn, at one rate after the other.

Started by that script on hosts of a netlab, with the name of a JSON file that says what to measure.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from pdmpi.config.load import parse_config
from pdmpi.config.run import RunConfig
from pdmpi.graph import Ref
from pdmpi.graph.graph import INPUT
from pdmpi.model.build import build_stage
from pdmpi.model.factory import load_factory
from pdmpi.model.stage import StageModule
from pdmpi.model.trace import TracedModel
from pdmpi.plan.cluster import Cluster
from pdmpi.plan.partition import partition
from pdmpi.plan.plan import Plan, ScheduleChoice
from pdmpi.plan.profile import Profile
from pdmpi.plan.store import plan_from_bytes, plan_to_bytes
from pdmpi.runtime.cluster import measured_cluster
from pdmpi.runtime.evaluation import Score
from pdmpi.runtime.place import open_on
from pdmpi.runtime.profiling import profile_run
from pdmpi.runtime.report import SegmentReport
from pdmpi.runtime.setup import load_datasets, trace_run
from pdmpi.runtime.trainer import Position, Trainer
from pdmpi.schedule.registry import program_of
from pdmpi.simulate.auto_depth import auto_depth
from pdmpi.simulate.costs import costs_of
from pdmpi.simulate.engine import simulate
from pdmpi.transport.mpi import MpiTransport

INTERFACE = "eth0"
PORT = 29577
RANKS = 2


class Contestant(Protocol):
    """Something that trains the model on both ranks."""

    samples: int
    """Samples of one run, both ranks together."""

    def run_s(self) -> float:
        """Run once, and return this rank's seconds."""


class Listener:
    """Keeps how long the last program took."""

    duration_s = 0.0

    def notice(self, text: str) -> None:
        """Nothing to tell."""

    def progress(self, epoch: int, done: int, total: int, loss: float) -> None:
        """No bar."""

    def segment(self, report: SegmentReport) -> None:
        """Keep the time."""
        self.duration_s = report.duration_s

    def evaluated(self, epoch: int, score: Score) -> None:
        """No evaluation here."""


def config_of(case: Mapping[str, Any], schedule: str, minibatches: int) -> RunConfig:
    """Return the configuration of one of our schedules, whose epoch is so many minibatches."""
    is_split = schedule in ("gpipe", "1f1b")
    data = {**case["data"], "args": {**case["data"]["args"], "count": case["rows"] * minibatches}}
    return parse_config({
        "model": case["model"], "data": data, "loss": case["loss"],
        "optimizer": {"name": "SGD", "args": {"lr": 0.001, "momentum": 0.9}},
        "schedule": {"name": schedule, "microbatches": case["microbatches"] if is_split else 1},
        "train": {"minibatch_size": case["rows"], "epochs": 1_000, "evaluate_every": 0, "device": "cpu"},
        "checkpoint": {"enabled": False, "every_minibatches": 1_000_000},
        "runtime": {"stall_timeout_s": 900},
    })  # fmt: skip


class Ours:
    """One of our schedules."""

    def __init__(
        self, case: Mapping[str, Any], plan: Plan, minibatches: int, transport: MpiTransport
    ) -> None:
        config = config_of(case, plan.schedule.name, minibatches)
        self._listener = Listener()
        self._transport = transport
        self._trainer = Trainer(config, plan, transport, load_datasets(config), self._listener)
        self._position = Position()
        self.samples = case["rows"] * minibatches

    def run_s(self) -> float:
        self._position = self._trainer.epoch(self._position)
        return float(self._transport.broadcast(repr(self._listener.duration_s).encode()))


def batches_of(case: Mapping[str, Any], count: int, first: int) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    """Return so many minibatches of (inputs, target), read and collated."""
    dataset = load_datasets(config_of(case, "pipedream", first + count)).train
    found = []
    for k in range(first, first + count):
        rows = [dataset[k * case["rows"] + i] for i in range(case["rows"])]
        sources, targets = zip(*rows, strict=True)
        parts = list(zip(*sources, strict=True)) if isinstance(sources[0], tuple) else [sources]
        found.append((tuple(torch.stack(part) for part in parts), torch.stack(targets)))
    return found


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.001, momentum=0.9)


class Ddp:
    """torch's DistributedDataParallel over Gloo: buckets leave while the backward runs."""

    def __init__(self, case: Mapping[str, Any], steps: int) -> None:
        torch.manual_seed(0)
        model = load_factory(case["model"]["factory"])(**case["model"]["args"])
        self._model = DistributedDataParallel(model)
        self._optimizer = optimizer_of(model)
        self._loss = load_factory(case["loss"]["factory"])(**case["loss"].get("args", {}))
        self._batches = batches_of(case, steps, dist.get_rank() * steps)
        self.samples = case["rows"] * steps * RANKS

    def run_s(self) -> float:
        dist.barrier()
        begin = perf_counter()
        for inputs, target in self._batches:
            self._optimizer.zero_grad(set_to_none=True)
            self._loss(self._model(*inputs), target).backward()
            self._optimizer.step()
        return perf_counter() - begin


class Dense(torch.autograd.Function):
    """The identity, whose gradient is contiguous: Gloo sends no other."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.contiguous()


class Part(nn.Module):
    """A stage of a plan as torch's pipeline wants it: tensors in, tensors out."""

    def __init__(self, stage: StageModule, takes: list[Ref], gives: list[Ref]) -> None:
        super().__init__()
        self.stage = stage
        self._takes, self._gives = takes, gives

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        taken = [Dense.apply(t) if t.is_floating_point() else t for t in tensors]
        values = self.stage(dict(zip(self._takes, taken, strict=True)), 0)
        found = tuple(values[ref] for ref in self._gives)
        return found[0] if len(found) == 1 else found


class Theirs:
    """torch.distributed.pipelining's 1F1B over Gloo, with the same cut."""

    def __init__(self, case: Mapping[str, Any], plan: Plan, traced: TracedModel, minibatches: int) -> None:
        rank = dist.get_rank()
        graph = traced.graph
        stages = [stage.layers for stage in plan.stages]
        inputs = [Ref(layer.name, 0) for layer in graph.layers if layer.kind == INPUT]
        crossing = list(graph.crossing(stages)[0, 1])
        module = build_stage(traced, stages[rank], last=rank == 1)
        takes, gives = ([inputs, crossing], [crossing, list(graph.outputs)])
        self._part = Part(module, takes[rank], gives[rank])
        self._batches = batches_of(case, minibatches, 0)
        taken, given = self._examples(case["microbatches"])
        self._stage = PipelineStage(self._part, rank, RANKS, torch.device("cpu"), taken, given)
        loss = load_factory(case["loss"]["factory"])(**case["loss"].get("args", {}))
        self._schedule = Schedule1F1B(
            self._stage, case["microbatches"],
            loss_fn=lambda output, target: loss(traced.unflatten(as_values(graph.outputs, output)), target),
        )  # fmt: skip
        self._optimizer = optimizer_of(self._part)
        self.samples = case["rows"] * minibatches

    def _examples(self, microbatches: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return what the stage takes and gives; torch would find out with numbers that are no tokens."""
        crossing: list[Any] = [None]
        if dist.get_rank() == 0:
            taken = tuple(tensor.chunk(microbatches)[0] for tensor in self._batches[0][0])
        else:
            dist.broadcast_object_list(crossing, 0)
            taken = tuple(
                torch.zeros(shape, dtype=dtype, requires_grad=grad) for shape, dtype, grad in crossing[0]
            )
        found = self._part(*taken)
        left = found if isinstance(found, tuple) else (found,)
        given = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in left)
        if dist.get_rank() == 0:
            described = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in given]
            dist.broadcast_object_list([described], 0)
        return taken, given

    def run_s(self) -> float:
        dist.barrier()
        begin = perf_counter()
        for inputs, target in self._batches:
            if self._stage.is_first:
                self._schedule.step(*inputs)
            else:
                self._schedule.step(target=target, losses=[])
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return perf_counter() - begin


def as_values(refs: tuple[Ref, ...], output: Any) -> dict[Ref, Tensor]:
    """Return a pipeline's outputs by name, as a stage returns them."""
    tensors = output if isinstance(output, (tuple, list)) else (output,)
    return dict(zip(refs, tensors, strict=True))


def wire_bytes() -> int:
    """Return the bytes that this host's interface has sent and received."""
    base = Path("/sys/class/net") / INTERFACE / "statistics"
    return sum(int((base / name).read_text()) for name in ("tx_bytes", "rx_bytes"))


class Bench:
    """All contestants of one model."""

    def __init__(self, case: Mapping[str, Any], transport: MpiTransport) -> None:
        self.case = case
        self.transport = transport
        self.config = config_of(case, "pipedream", 2)
        self.traced = trace_run(self.config)
        self._made: dict[str, tuple[Any, Contestant]] = {}

    def shared(self, make: Any) -> bytes:
        """Return on every rank what rank 0 makes."""
        return self.transport.broadcast(make() if self.transport.rank == 0 else b"")

    def profiles(self) -> dict[str, Profile]:
        """Return what whole minibatches and microbatches cost now, by how many there are of them."""
        found: dict[str, Profile] = {}
        for parts in (1, self.case["microbatches"]):
            schedule = "pipedream" if parts == 1 else "1f1b"

            def packed(schedule: str = schedule, parts: int = parts) -> bytes:
                profile = profile_run(config_of(self.case, schedule, 2), repeats=self.case["profile_repeats"])
                choice = ScheduleChoice(name=schedule, microbatches=parts)
                return plan_to_bytes(partition(profile, alone(), choice, shape=(1,)))

            found[str(parts)] = plan_from_bytes(self.shared(packed)).profile
        return found

    def plans(self, profiles: Mapping[str, Profile], cluster: Cluster) -> dict[str, Plan]:
        """Return our plans, and ``"chosen"``: the planner's own."""
        found: dict[str, Plan] = {}
        choices = {
            "pipedream": (ScheduleChoice(), (1, 1)), "chosen": (ScheduleChoice(), ()),
            "data-parallel": (ScheduleChoice(name="data-parallel"), (RANKS,)),
            **{
                name: (ScheduleChoice(name=name, microbatches=self.case["microbatches"]), (1, 1))
                for name in ("gpipe", "1f1b")
            },
        }  # fmt: skip
        for label, (choice, shape) in choices.items():

            def made(choice: ScheduleChoice = choice, shape: tuple[int, ...] = shape) -> bytes:
                plan = partition(profiles[str(choice.microbatches)], cluster, choice, shape=shape)
                if choice.name == "pipedream" and len(plan.stages) > 1:
                    extra = auto_depth(plan).extra_in_flight
                    plan = replace(plan, schedule=replace(plan.schedule, extra_in_flight=extra))
                return plan_to_bytes(plan)

            found[label] = plan_from_bytes(self.shared(made))
        for label in ("gpipe", "1f1b"):  # the same cut for all pipelines
            found[label] = replace(found[label], stages=found["pipedream"].stages)
        return found

    def contestants(self, plans: Mapping[str, Plan]) -> dict[str, Contestant]:
        """Return them, made again where their plan became another."""
        case, long, short = self.case, self.case["pipeline_minibatches"], self.case["parallel_steps"]
        for label in case["contestants"]:
            plan = plans.get(label, plans["pipedream"])
            key = (plan.stages, plan.schedule)
            if label in self._made and self._made[label][0] == key:
                continue
            self._made.pop(label, None)
            if label == "ddp":
                made: Contestant = Ddp(case, short)
            elif label == "torch-1f1b":
                made = Theirs(case, plan, self.traced, long)
            else:
                made = Ours(case, plan, short * RANKS if label == "data-parallel" else long, self.transport)
            self._made[label] = (key, made)
        return {label: self._made[label][1] for label in case["contestants"]}

    def turn(self, contestant: Contestant) -> tuple[float, float]:
        """Run once; return samples a second and bytes a sample on this host's wire, known on every rank."""
        self.transport.barrier()
        before = wire_bytes()
        spent = np.array([contestant.run_s()])
        times = np.frombuffer(b"".join(self.transport.gather(spent.tobytes())))
        moved = wire_bytes() - before
        seconds = float(self.shared(lambda: repr(float(times.max())).encode()))
        return contestant.samples / seconds, moved / contestant.samples

    def predicted(self, plan: Plan, samples: int) -> float:
        """Return the simulator's samples a second for the same program."""
        minibatches = samples // self.case["rows"]
        return samples / simulate(program_of(plan, minibatches), costs_of(plan)).duration_s


def measured_at(bench: Bench, rate: str, repeats: int) -> dict[str, Any]:
    """Return the figures of all contestants at one rate; complete on rank 0."""
    profiles = bench.profiles()
    cluster = measured_cluster(bench.transport)
    plans = bench.plans(profiles, cluster)
    contestants = bench.contestants(plans)
    rates: dict[str, list[float]] = {label: [] for label in contestants}
    moved: dict[str, list[float]] = {label: [] for label in contestants}
    for _ in range(repeats):
        for label, contestant in contestants.items():
            speed, nbytes = bench.turn(contestant)
            rates[label].append(speed)
            moved[label].append(nbytes)
            if bench.transport.rank == 0:
                print(f"  {rate} {label}: {speed:.3g} samples/s", file=sys.stderr, flush=True)
    profile = profiles["1"]
    compute = sum(cost.forward_s + cost.backward_s for cost in profile.costs)
    parameters = sum(cost.parameter_bytes for cost in profile.costs)
    level = cluster.levels[-1]
    allreduce = 2 * (RANKS - 1) / RANKS * parameters / level.bandwidth_bytes_per_s
    chosen = plans["chosen"]
    return {
        "rate": rate,
        "link_bytes_per_s": level.bandwidth_bytes_per_s,
        "relative_speed": cluster.device(0).relative_speed,
        "parameter_bytes": parameters,
        "compute_s": compute,
        "allreduce_s": allreduce,
        "network_over_compute": allreduce / (compute / cluster.device(0).relative_speed),
        "chosen": "-".join(str(stage.replicas) for stage in chosen.stages),
        "cut": plans["pipedream"].stages[1].layers[0],
        "extra_in_flight": plans["pipedream"].schedule.extra_in_flight,
        "contestants": {
            label: {
                "samples_per_s": statistics.median(rates[label]),
                "all_samples_per_s": rates[label],
                "bytes_per_sample": statistics.median(moved[label]),
                "predicted_samples_per_s": bench.predicted(plans[label], contestant.samples)
                if label in plans
                else None,
                "over": {
                    other: statistics.median(a / b for a, b in zip(rates[label], rates[other], strict=True))
                    for other in contestants
                },
            }
            for label, contestant in contestants.items()
        },
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    case = json.loads(Path(sys.argv[1]).read_text())
    transport, _, _ = open_on("cpu", 900.0)
    first = transport.broadcast(socket.gethostname().encode()).decode()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    dist.init_process_group("gloo", f"tcp://{first}:{PORT}", rank=transport.rank, world_size=RANKS)
    bench = Bench(case, transport)
    for index, rate in enumerate(case["rates"]):
        bench.shared(lambda rate=rate: set_rate(case, rate))
        if index == 0:
            measured_at(bench, "warm-up", 1)
        row = measured_at(bench, rate, case["repeats"])
        if transport.rank == 0:
            with Path(case["output"]).open("a") as file:
                file.write(json.dumps({"model": case["name"], **row}) + "\n")
    dist.destroy_process_group()
    transport.close()


def alone() -> Cluster:
    """Return a cluster of one device, for a plan that carries a profile to the other ranks."""
    from pdmpi.plan.cluster import Level

    return Cluster(name="alone", levels=(Level(name="none", count=1, bandwidth_bytes_per_s=1e9),))


def set_rate(case: Mapping[str, Any], rate: str) -> bytes:
    """Shape all links of the netlab, from within one of its hosts."""
    subprocess.run([case["netlab"], "rate", case["directory"], rate], check=True)
    return b"set"


if __name__ == "__main__":
    main()
