"""From a configuration and a plan to what one rank needs to run: checked first, allocated after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from pdmpi.config.run import RunConfig
from pdmpi.errors import InputError
from pdmpi.graph import Ref, TensorSpec
from pdmpi.graph.graph import INPUT
from pdmpi.model.build import build_stage
from pdmpi.model.example import dtype_of, example_batch, microbatch_size
from pdmpi.model.factory import load_factory
from pdmpi.model.lr_schedule import lr_schedule_problems
from pdmpi.model.optimizer import check_optimizer, make_optimizer, parameter_groups
from pdmpi.model.trace import TracedModel, trace_model
from pdmpi.plan.plan import Plan, ScheduleChoice
from pdmpi.plan.terms import SCHEDULES
from pdmpi.runtime.boundary import boundary_of
from pdmpi.runtime.capture import CudaCapturer
from pdmpi.runtime.gradients import GradientReducer
from pdmpi.runtime.graphs import GraphedPlayer
from pdmpi.runtime.joint_norm import JointNormalisation
from pdmpi.runtime.limit import (
    JointLimit,
    Limit,
    limit_of,
    limit_problems,
    looks_into_updates,
    updates_jointly,
)
from pdmpi.runtime.loss_scale import LossScale
from pdmpi.runtime.mailbox import Mailbox
from pdmpi.runtime.player import Player
from pdmpi.runtime.prediction import WeightPrediction
from pdmpi.runtime.rates import Rates, changes_rates, rates_of
from pdmpi.runtime.slots import Allocate, device_memory, host_memory
from pdmpi.runtime.statistics import MinibatchStatistics
from pdmpi.runtime.ways import why_no_graphs, why_not_compiled
from pdmpi.runtime.weights import WeightRing
from pdmpi.schedule.check import violations
from pdmpi.schedule.program import ALL_STAGES, Op, Program, Topology
from pdmpi.schedule.registry import program_of
from pdmpi.schedule.topology import topology_of
from pdmpi.transport.base import Transport
from pdmpi.transport.share import share

__all__ = [
    "Datasets", "Rank", "build_rank", "check_fit", "label_of", "load_datasets", "quantum_of",
    "recomputation_problems", "trace_run", "training_program", "waiting_problems",
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
    joint
        Its part in the sum over all stages before they update together; None where they do not.
    loss_scale
        In float16.
    traced
        The whole model, without memory.
    reads_input, computes_loss
        For each of its stages: whether it reads the model's inputs, and whether it is the
        last one.
    why_eager
        Why a GPU's kernels are launched one by one; empty where they are not, and on a CPU.
    """

    players: Mapping[int, Player]
    mailbox: Mailbox
    joint: JointLimit | None
    loss_scale: LossScale | None
    traced: TracedModel
    reads_input: Mapping[int, bool]
    computes_loss: Mapping[int, bool]
    why_eager: str = ""


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
    names = [name for name, _ in traced.module.named_parameters(remove_duplicate=False)]
    InputError.collect(
        [
            *problems,
            *_sharing_problems(plan),
            *_softening_problems(config),
            *limit_problems(config),
            *_normalisation_problems(config, plan, traced),
            *check_optimizer(config.optimizer, names),
            *lr_schedule_problems(config.optimizer),
        ]
    )


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


def recomputation_problems(plan: Plan, traced: TracedModel, program: Program) -> list[str]:
    """Return which layers must not run twice, but are in stages that the program recomputes."""
    rows = np.concatenate(program.rows)
    again = np.unique(rows[rows[:, 0] == Op.RECOMPUTE, 1]).tolist()
    return [
        f"layer {name!r} of stage {stage} changes the buffers {', '.join(changed)} in its forward, which "
        'recomputation would change twice; plan with [schedule] recompute = "never"'
        for stage in again
        for name in plan.stages[stage].layers
        if (changed := traced.changed_buffers(name))
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
    predicts = asked.weight_prediction
    if predicts and not (optimizer.name == "SGD" and optimizer.args.get("momentum", 0)):
        problems.append(
            "[schedule] weight_prediction = true predicts by SGD's momentum, [optimizer] is "
            f'{optimizer.name} with args = {optimizer.args}; set name = "SGD" and a momentum, or leave it out'
        )
    given = [optimizer.args, *(group.args for group in optimizer.groups)]
    problems += [
        f"[schedule] weight_prediction = true predicts a step of plain SGD, [optimizer] has {key} = true; "
        f"leave {key} or weight_prediction out"
        for key in ("nesterov", "maximize")
        if predicts and any(args.get(key) for args in given)
    ]
    return problems


def _normalisation_problems(config: RunConfig, plan: Plan, traced: TracedModel) -> list[str]:
    """Return why replicas cannot normalise together."""
    name = config.schedule.name
    if config.train.batch_norm != "synchronised" or name not in SCHEDULES:
        return []
    if SCHEDULES[name].flushes and not SCHEDULES[name].splits_backward:
        return [
            f'[train] batch_norm = "synchronised": {reason} in layer {layer!r}, which has replicas; '
            'set it to "microbatch", or give that stage one replica'
            for stage in plan.stages
            if stage.replicas > 1
            for layer in stage.layers
            if (reason := traced.normalises_alone(layer))
        ]
    return [
        f'[train] batch_norm = "synchronised", but schedule {name!r} '
        + ("runs its backward in two parts" if SCHEDULES[name].splits_backward else "does not flush")
        + '; set it to "microbatch", or take 1f1b, gpipe or data-parallel'
    ]


def waiting_problems(config: RunConfig, plan: Plan, traced: TracedModel) -> list[str]:
    """Return that replicas which normalise together would wait for each other for ever, and the remedy.

    Flushed 1F1B lets a replica go backward before the next one has what it needs to go forward,
    unless the input stage runs further ahead.
    """
    if config.train.batch_norm != "synchronised":
        return []
    size = quantum_of(plan.schedule, topology_of(plan))

    def is_stuck(extra: int) -> bool:
        ahead = replace(plan, schedule=replace(plan.schedule, extra_in_flight=extra))
        return bool(violations(training_program(config, ahead, traced, size)))

    planned = plan.schedule.extra_in_flight
    if not is_stuck(planned):
        return []
    tried = range(planned + 1, planned + 1 + 2 * topology_of(plan).round)
    enough = next((extra for extra in tried if not is_stuck(extra)), None)
    remedy = "--schedule gpipe" if enough is None else f"--extra-in-flight {enough}"
    return [
        '[train] batch_norm = "synchronised": replicas would wait for each other for ever, since schedule '
        f"{plan.schedule.name!r} has too few microbatches in flight; plan with {remedy}"
    ]


def training_program(config: RunConfig, plan: Plan, traced: TracedModel, num_minibatches: int) -> Program:
    """Return the program that trains so many minibatches of a run."""
    joint: list[int] = []
    if config.train.batch_norm == "synchronised":
        joint = [s for s, stage in enumerate(plan.stages) if any(map(traced.normalises, stage.layers))]
    return program_of(
        plan, num_minibatches, joint_updates=updates_jointly(config, plan), joint_statistics=joint
    )


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
        pair: {ref: replace(graph.spec(ref), requires_grad=graph.returns_gradient(ref)) for ref in refs}
        for pair, refs in graph.crossing([s.layers for s in plan.stages]).items()
    }
    groups = list(dict.fromkeys(group.ranks for group in training.groups))
    normalised = {group.stage for group in training.groups if group.statistics}
    transport.prepare(groups, sorted({config.train.dtype, "float64"}) if groups else [])
    programs = [training, *others]
    last = len(plan.stages) - 1
    inputs = {layer.name for layer in graph.layers if layer.kind == INPUT}
    allocate = host_memory if device.type == "cpu" else device_memory(transport)
    limit = limit_of(config)
    why_eager = why_no_graphs(config, programs, transport) if device.type == "cuda" else ""
    if why_eager and config.runtime.cuda_graphs is True:
        raise InputError(f'[runtime] cuda_graphs = true, but {why_eager}; set it to "auto"')
    if config.runtime.compile:
        reasons = share(transport, why_not_compiled(config, programs, device))
        InputError.collect(
            f"[runtime] compile = true, but {why}; set it to false"
            for why in dict.fromkeys(filter(None, reasons))
        )
    graphs = device.type == "cuda" and config.runtime.cuda_graphs and not why_eager
    played: Callable[..., Player] = Player
    if graphs:
        played = partial(
            GraphedPlayer,
            capturer=CudaCapturer(),
            graph_updates=limit is None and not changes_rates(config),
            insist=config.runtime.cuda_graphs is True,
        )
    players: dict[int, Player] = {}
    for stage, ranks in enumerate(topology.ranks):
        if transport.rank not in ranks:
            continue
        module = build_stage(
            traced,
            plan.stages[stage].layers,
            device=device,
            last=stage == last,
            compiles=config.runtime.compile,
        )
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        names = _names_of(module)
        weights = WeightRing(
            trainable,
            training.slots[stage].weights,
            partial(_optimizer, config, names=names, device=device),
            fuses=not looks_into_updates(config),
        )
        rates = rates_of(config, training, stage, weights.optimizer)
        players[stage] = played(
            module,
            weights,
            boundary_of(stage, programs, edges, allocate),
            reducer=GradientReducer(trainable, transport, ranks, allocate) if len(ranks) > 1 else None,
            device=device,
            scale=1.0 / training.microbatches_per_update[stage],
            rates=rates,
            prediction=_prediction(config, training, stage, weights, rates),
            dtype=dtype_of(config),
            limit=limit,
            statistics=(
                MinibatchStatistics(module, transport, ranks, allocate)
                if config.train.batch_norm == "minibatch"
                else None
            ),
            joint_norm=(
                JointNormalisation(module, transport, ranks, allocate) if stage in normalised else None
            ),
        )
    return Rank(
        players=players,
        joint=None if limit is None else _joint_limit(limit, players, training, transport, allocate),
        loss_scale=None if limit is None else limit.loss_scale,
        mailbox=Mailbox(transport, {s: p.boundary for s, p in players.items()}),
        traced=traced,
        reads_input={s: any(name in inputs for name in plan.stages[s].layers) for s in players},
        computes_loss={s: s == last for s in players},
        why_eager=why_eager,
    )


def _joint_limit(
    limit: Limit, players: Mapping[int, Player], training: Program, transport: Transport, allocate: Allocate
) -> JointLimit | None:
    """Return a rank's part in the program's sum over all stages, if it has one."""
    for group in training.groups:
        if group.stage == ALL_STAGES:
            ranks = training.topology.ranks
            return JointLimit(
                limit,
                players,
                brings=[stage for stage in players if ranks[stage][0] == transport.rank],
                num_stages=len(ranks),
                transport=transport,
                ranks=group.ranks,
                allocate=allocate,
            )
    return None


def _names_of(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter by its first one."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {of[0]: of for of in names.values()}


def _prediction(
    config: RunConfig, training: Program, stage: int, weights: WeightRing, rates: Rates | None
) -> WeightPrediction | None:
    if rates is None or not config.schedule.weight_prediction:
        return None
    return WeightPrediction(weights, rates, microbatches_per_update=training.microbatches_per_update[stage])


def _optimizer(
    config: RunConfig,
    masters: Mapping[str, nn.Parameter],
    *,
    names: Mapping[str, Sequence[str]],
    device: torch.device,
) -> torch.optim.Optimizer | None:
    if not masters:
        return None
    return make_optimizer(config.optimizer, parameter_groups(config.optimizer, masters, names), device)
