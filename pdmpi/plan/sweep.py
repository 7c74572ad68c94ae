"""What-if: throughput over numbers of devices and bandwidths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from pdmpi.errors import InputError
from pdmpi.plan.alternatives import data_parallel_plan
from pdmpi.plan.cluster import Cluster, Level
from pdmpi.plan.partition import fits, partition
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.plan.profile import Profile

__all__ = ["Case", "Outcome", "resized", "sweep"]


@dataclass(frozen=True, slots=True)
class Case:
    """One cluster of a sweep: devices, and the bandwidth of its outermost links in bytes per second."""

    devices: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best plan of a case; no shape and no samples where nothing fits.

    ``data_parallel_per_s`` is what data parallelism gives there, 0 where it does not fit.
    """

    case: Case
    shape: str
    samples_per_s: float
    data_parallel_per_s: float
    bytes_per_sample: float


def resized(cluster: Cluster, case: Case) -> Cluster:
    """Return a cluster of the same kind of nodes with another number of devices and other outer links.

    Nodes are filled one after another; a number that fills no node evenly, or less than one
    node, is taken as one level of that many devices (on the inner links within a node, on
    the outer ones beyond).
    """
    inner, outer = cluster.levels[0], cluster.levels[-1]
    outer = replace(outer, bandwidth_bytes_per_s=case.bandwidth_bytes_per_s)
    device = cluster.devices[:1]
    node = inner.count
    levels: tuple[Level, ...]
    if len(cluster.levels) == 1:
        levels, per_node = (replace(outer, count=case.devices),), min(cluster.devices_per_node, case.devices)
    elif case.devices <= node:
        levels, per_node = (replace(inner, count=case.devices),), case.devices
    elif case.devices % node:
        levels, per_node = (replace(outer, count=case.devices, shared=False),), 1
    else:
        levels, per_node = (inner, replace(outer, count=case.devices // node)), node
    if case.devices % per_node:
        per_node = 1
    return Cluster(
        name=f"{cluster.name} with {case.devices} devices",
        levels=levels,
        devices=device,
        devices_per_node=per_node,
    )


def run_case(profile: Profile, cluster: Cluster, schedule: ScheduleChoice, case: Case) -> Outcome:
    """Return the outcome of one case."""
    sized = resized(cluster, case)
    parallel = data_parallel_plan(profile, sized)
    rate = parallel.prediction.samples_per_s if fits(parallel) else 0.0
    try:
        plan = partition(profile, sized, schedule)
    except InputError:
        return Outcome(case, "does not fit", 0.0, rate, 0.0)
    shape = "-".join(str(stage.replicas) for stage in plan.stages)
    moved = sum(plan.prediction.link_bytes) / profile.microbatch_size
    return Outcome(case, shape, plan.prediction.samples_per_s, rate, moved)


def sweep(
    profile: Profile, cluster: Cluster, schedule: ScheduleChoice, cases: Sequence[Case], workers: int
) -> Iterator[Outcome]:
    """Yield the outcome of every case in order, computed by ``workers`` processes."""
    if workers == 1:
        yield from (run_case(profile, cluster, schedule, case) for case in cases)
        return
    with ProcessPoolExecutor(workers) as pool:
        waiting = [pool.submit(run_case, profile, cluster, schedule, case) for case in cases]
        for job in waiting:
            yield job.result()
