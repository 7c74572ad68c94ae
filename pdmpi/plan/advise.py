"""Whether to pipeline at all: the decision table of the GPipe note, with a profile's numbers.

Memory fits one device: data parallelism, unless the network is slow.  Layers are uniform:
GPipe or flushed 1F1B.  Under four microbatches a stage: fewer stages.  Under eight
samples a microbatch with BatchNorm: its statistics get noisy.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmpi.plan.alternatives import data_parallel_plan
from pdmpi.plan.cluster import Cluster
from pdmpi.plan.partition import estimate_of, fits, partition
from pdmpi.plan.plan import Plan, ScheduleChoice
from pdmpi.plan.profile import Profile

__all__ = ["Advice", "Answer", "advise"]

_WORTHWHILE = 1.05
_UNEVEN = 0.8
_FEW_MICROBATCHES = 4
_SMALL_BATCH = 8


@dataclass(frozen=True, slots=True)
class Answer:
    """One row of the table: the question, this profile's number, what follows."""

    question: str
    found: str
    advice: str


@dataclass(frozen=True, slots=True)
class Advice:
    """The rows, the verdict, and the plans it rests on."""

    answers: tuple[Answer, ...]
    verdict: str
    pipeline: bool
    plan: Plan
    data_parallel: Plan


def advise(
    profile: Profile,
    cluster: Cluster,
    microbatches: int = 1,
    plan: Plan | None = None,
    data_parallel: Plan | None = None,
) -> Advice:
    """Return advice for a profile on a cluster.

    Parameters
    ----------
    microbatches
        Microbatches that a minibatch can be split into, for schedules that flush.
    plan
        The plan to advise on; the best one when it is not given.
    data_parallel
        The plan of `data_parallel_plan`, with a better prediction than the closed form.
    """
    plan = plan or partition(profile, cluster, ScheduleChoice(recompute="auto"))
    parallel = data_parallel or data_parallel_plan(profile, cluster)
    gain = plan.prediction.samples_per_s / parallel.prediction.samples_per_s
    parallel_fits = fits(parallel)
    answers = [_memory(parallel, parallel_fits), _network(plan, parallel, gain)]
    answers.append(_balance(plan))
    stages = max(len(plan.stages), 2)
    enough = microbatches >= _FEW_MICROBATCHES * stages
    answers.append(
        Answer(
            "Are there four microbatches a stage?",
            f"{microbatches} microbatches, {stages} stages",
            "GPipe and flushed 1F1B keep their bubble small"
            if enough
            else f"a flushing schedule idles {(stages - 1) / (microbatches + stages - 1):.0%}: use fewer "
            "stages, more microbatches, or a schedule that does not flush (pipedream, 2bw)",
        )
    )
    norms = [layer.name for layer in profile.graph.layers if layer.kind.startswith("BatchNorm")]
    if norms:
        small = profile.microbatch_size < _SMALL_BATCH
        answers.append(
            Answer(
                "Does BatchNorm see enough samples?",
                f"{len(norms)} BatchNorm layers, microbatches of {profile.microbatch_size}",
                "warning: statistics of fewer than eight samples are noisy; use larger microbatches, "
                'GroupNorm, or replicas with [train] batch_norm = "synchronised"'
                if small
                else "yes",
            )
        )
    pipeline = len(plan.stages) > 1 and (gain > _WORTHWHILE or not parallel_fits)
    verdict = _verdict(plan, parallel_fits, gain, pipeline)
    return Advice(tuple(answers), verdict, pipeline, plan, parallel)


def _memory(parallel: Plan, fits_one: bool) -> Answer:
    need = max(parallel.prediction.memory_bytes) / 2**30
    has = min((d.memory_bytes for d in parallel.cluster.devices if d.memory_bytes), default=0) / 2**30
    return Answer(
        "Does the model fit one device?",
        f"needs {need:.3g} GiB, a device has {has:.3g} GiB"
        if has
        else f"needs {need:.3g} GiB, no limit given",
        "yes: data parallelism is possible" if fits_one else "no: data parallelism is out, pipeline it",
    )


def _network(plan: Plan, parallel: Plan, gain: float) -> Answer:
    stage = estimate_of(parallel).stages[0]
    moved, other = sum(plan.prediction.link_bytes), sum(parallel.prediction.link_bytes)
    less = f"; the plan moves {1 - moved / other:.0%} fewer bytes a sample" if moved < other else ""
    return Answer(
        "Can the network keep up with data parallelism?",
        f"allreduce {stage.sync_s:.3g} s beside a backward of {stage.backward_s:.3g} s",
        (
            "yes: it hides behind the backward"
            if stage.sync_s <= stage.backward_s
            else "no: devices wait for it"
        )
        + f"; pipelining is {gain:.2f} times as fast{less}",
    )


def _balance(plan: Plan) -> Answer:
    stages = estimate_of(plan).stages
    periods = [stage.period_s for stage in stages]
    share = sum(periods) / len(periods) / max(periods)
    return Answer(
        "Are stages even?",
        f"the mean stage takes {share:.0%} of the slowest",
        "yes: GPipe, 1F1B and PipeDream all fit"
        if share >= _UNEVEN
        else "no: replicate the slow stage (PipeDream's hybrid) or split its layers",
    )


def _verdict(plan: Plan, parallel_fits: bool, gain: float, pipeline: bool) -> str:
    shape = "-".join(str(stage.replicas) for stage in plan.stages)
    if pipeline:
        why = f"{gain:.2f} times data parallelism" if parallel_fits else "data parallelism does not fit"
        return f"pipeline it as {shape}: {why}"
    if len(plan.stages) == 1:
        return f"use data parallelism ({shape} replicas): no pipeline is predicted to be faster"
    return f"use data parallelism: the best pipeline ({shape}) is only {gain:.2f} times as fast"
