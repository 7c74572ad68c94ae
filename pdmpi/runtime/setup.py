"""From a configuration and a plan to what one rank needs to run: checked first, allocated after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from pdmpi.config.run import RunConfig
from pdmpi.errors import InputError
from pdmpi.graph import Ref, TensorSpec
from pdmpi.graph.graph import INPUT
from pdmpi.model.build import build_stage, load_factory
from pdmpi.model.example import dtype_of, example_batch, microbatch_size
from pdmpi.model.optimizer import make_optimizer
from pdmpi.model.trace import TracedModel, trace_model
from pdmpi.plan.plan import Plan, ScheduleChoice
from pdmpi.plan.terms import SCHEDULES
from pdmpi.runtime.boundary import boundary_of
from pdmpi.runtime.gradients import GradientReducer
from pdmpi.runtime.mailbox import Mailbox
from pdmpi.runtime.player import Player
from pdmpi.runtime.slots import device_memory, host_memory
from pdmpi.runtime.softening import Softening
from pdmpi.runtime.weights import WeightRing
from pdmpi.schedule.program import Program, Topology
from pdmpi.schedule.staleness import version_lag
from pdmpi.transport.base import Transport

__all__ = [
    "Datasets", "Rank", "build_rank", "check_fit", "label_of", "load_datasets", "quantum_of", "trace_run",
]  # fmt: skip


@dataclass(frozen=True)
class Datasets:
    """Map-style datasets of (input, target) pairs."""

    train: Dataset[Any]
    test: Dataset[Any] | None


@dataclass(frozen=True)
class Rank:
    """What one rank runs.

    Attributes
    ----------
    players
        Its stages.
    mailbox
        Its transfers.
    traced
        The whole model, without memory.
    reads_input, computes_loss
        For each of its stages: whether it reads the model's inputs, and whether it is the
        last one.
    """

    players: Mapping[int, Player]
    mailbox: Mailbox
    traced: TracedModel
    reads_input: Mapping[int, bool]
    computes_loss: Mapping[int, bool]


def label_of(plan: Plan, rank: int) -> str:
    """Return ``"stage 1, replica 0"`` for the stages that a rank plays."""
    places = [p for p in plan.placement if p.rank == rank]
    return "; ".join(f"stage {p.stage}, replica {p.replica}" for p in places)


def quantum_of(choice: ScheduleChoice, topology: Topology) -> int:
    """Return the number whose multiples of minibatches keep all replicas of every stage equally busy.

    One where a stage's replicas share the microbatches of each minibatch.
    """
    shared = choice.name != "data-parallel" and choice.microbatches % topology.round == 0
    return 1 if shared else topology.round


def check_fit(config: RunConfig, plan: Plan, traced: TracedModel, num_ranks: int) -> None:
    """Refuse a plan that does not fit the run, before anything is allocated.

    Raises
    ------
    InputError
        With all that differs: ranks, model, microbatch size, schedule.
    """
    problems = []
    if plan.num_ranks != num_ranks:
        problems.append(
            f"the plan is for {plan.num_ranks} ranks, {num_ranks} were started; "
            f"start {plan.num_ranks} (mpirun -n {plan.num_ranks}) or plan again for {num_ranks}"
        )
    if plan.profile.graph.fingerprint != traced.graph.fingerprint:
        problems.append(
            f"the plan is for another model (fingerprint {plan.profile.graph.fingerprint[:12]}, "
            f"{config.model.factory} has {traced.graph.fingerprint[:12]}); profile and plan this model"
        )
    size = microbatch_size(config)
    if plan.profile.microbatch_size != size:
        problems.append(
            f"the plan is for microbatches of {plan.profile.microbatch_size}, [train] minibatch_size / "
            f"[schedule] microbatches is {size}; set them alike or profile again"
        )
    for knob in ("name", "microbatches"):
        planned, asked = getattr(plan.schedule, knob), getattr(config.schedule, knob)
        if planned != asked:
            problems.append(
                f"the plan is for schedule {knob} {planned!r}, [schedule] {knob} = {asked!r}; "
                f"set it to {planned!r} or plan again"
            )
    for knob in ("recompute", "extra_in_flight"):
        planned, asked = getattr(plan.schedule, knob), getattr(config.schedule, knob)
        if knob in config.schedule.model_fields_set and asked not in (planned, "auto"):
            problems.append(
                f"[schedule] {knob} = {asked!r}, but the plan has {planned!r}; leave it out or plan again"
            )
    if not any(layer.trainable and layer.parameters for layer in traced.graph.layers):
        problems.append(f"[model] factory {config.model.factory!r} trains nothing; unfreeze a parameter")
    InputError.collect([*problems, *_sharing_problems(plan), *_softening_problems(config)])


def _sharing_problems(plan: Plan) -> list[str]:
    """Return which parameters would become two copies that drift apart."""
    readers: dict[str, set[int]] = {}
    stage_of = {name: s for s, stage in enumerate(plan.stages) for name in stage.layers}
    for layer in plan.profile.graph.layers:
        for name in layer.parameters:
            readers.setdefault(name, set()).add(stage_of[layer.name])
    groups = [*plan.profile.graph.ties, *((name,) for name in readers)]
    return [
        f"the plan reads the shared parameter {group[0]!r} in stages {sorted(stages)}; plan again: layers "
        "that share a parameter stay in one stage"
        for group in groups
        if len(stages := set().union(*(readers.get(name, set()) for name in group))) > 1
    ]


def _softening_problems(config: RunConfig) -> list[str]:
    """Return why stale weights cannot be softened as the configuration asks."""
    asked = config.schedule
    knobs = [knob for knob in ("staleness_warmup", "weight_prediction") if getattr(asked, knob)]
    problems = [
        f"[schedule] {knob} = {str(getattr(asked, knob)).lower()}: schedule {asked.name!r} has no stale "
        "weights; leave it out"
        for knob in knobs
        if asked.name in SCHEDULES and SCHEDULES[asked.name].flushes
    ]
    optimizer = config.optimizer
    if asked.weight_prediction and not (optimizer.name == "SGD" and optimizer.args.get("momentum", 0)):
        problems.append(
            "[schedule] weight_prediction = true predicts by SGD's momentum, [optimizer] is "
            f'{optimizer.name} with args = {optimizer.args}; set name = "SGD" and a momentum, or leave it out'
        )
    return problems


def load_datasets(config: RunConfig) -> Datasets:
    """Return the training set and, if the factory has one, the test set."""
    factory = load_factory(config.data.factory)
    try:
        train = factory(split="train", **config.data.args)
        test = factory(split="test", **config.data.args) if config.train.evaluate_every else None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"[data] factory {config.data.factory!r} failed: {reason}") from error
    return Datasets(train, test)


def trace_run(config: RunConfig, dataset: Dataset[Any] | None = None) -> TracedModel:
    """Trace the model of a run with the first microbatch of its training set."""
    source, _ = example_batch(config, dataset)
    return trace_model(config.model, source, seed=config.train.seed, dtype=dtype_of(config))


def build_rank(
    config: RunConfig,
    plan: Plan,
    traced: TracedModel,
    training: Program,
    others: Iterable[Program],
    transport: Transport,
    device: torch.device,
) -> Rank:
    """Build the stages of one rank, all buffers included; every rank calls it at the same time.

    Parameters
    ----------
    config, plan, traced
        As `check_fit` passed them.
    training
        A training program of the run.
    others
        Programs that may need more slots than it.
    transport
        Moves the messages.
    device
        Where the rank computes.
    """
    topology = training.topology
    graph = traced.graph
    edges: dict[tuple[int, int], dict[Ref, TensorSpec]] = {
        pair: {ref: graph.spec(ref) for ref in refs}
        for pair, refs in graph.crossing([s.layers for s in plan.stages]).items()
    }
    groups = [group.ranks for group in training.groups]
    transport.prepare(groups, sorted({config.train.dtype, "float64"}) if groups else [])
    programs = [training, *others]
    last = len(plan.stages) - 1
    inputs = {layer.name for layer in graph.layers if layer.kind == INPUT}
    allocate = host_memory if device.type == "cpu" else device_memory(transport)
    players: dict[int, Player] = {}
    for stage, ranks in enumerate(topology.ranks):
        if transport.rank not in ranks:
            continue
        module = build_stage(traced, plan.stages[stage].layers, device=device, last=stage == last)
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        weights = WeightRing(
            trainable, training.slots[stage].weights, lambda masters: _optimizer(config, masters)
        )
        players[stage] = Player(
            module,
            weights,
            boundary_of(stage, programs, edges, allocate),
            reducer=GradientReducer(trainable, transport, ranks, allocate) if len(ranks) > 1 else None,
            device=device,
            scale=1.0 / training.microbatches_per_update[stage],
            softening=_softening(config, training, stage, weights),
            autocast=dtype_of(config) if config.train.dtype == "bfloat16" else None,
        )
    return Rank(
        players=players,
        mailbox=Mailbox(transport, {s: p.boundary for s, p in players.items()}),
        traced=traced,
        reads_input={s: any(name in inputs for name in plan.stages[s].layers) for s in players},
        computes_loss={s: s == last for s in players},
    )


def _softening(config: RunConfig, training: Program, stage: int, weights: WeightRing) -> Softening | None:
    asked = config.schedule
    if not (asked.staleness_warmup or asked.weight_prediction):
        return None
    return Softening(
        weights,
        lag=int(version_lag(training)[stage].max(initial=0)),
        microbatches_per_update=training.microbatches_per_update[stage],
        warmup=asked.staleness_warmup,
        predicts=asked.weight_prediction,
    )


def _optimizer(config: RunConfig, masters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
    return make_optimizer(config.optimizer, masters.values()) if masters else None
