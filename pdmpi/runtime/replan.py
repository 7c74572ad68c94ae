"""A plan for the ranks that are there, made again from the profile that the given plan holds."""

from __future__ import annotations

from dataclasses import replace

from pdmpi.errors import InputError
from pdmpi.plan.cluster import Cluster, Level
from pdmpi.plan.partition import partition
from pdmpi.plan.plan import Plan
from pdmpi.plan.store import plan_from_bytes, plan_to_bytes
from pdmpi.runtime.agree import from_rank_0
from pdmpi.runtime.cluster import measured_cluster
from pdmpi.transport.base import Transport

__all__ = ["fits", "replan"]


def fits(plan: Plan, num_ranks: int) -> bool:
    """Whether a plan is for this number of ranks."""
    return plan.num_ranks == num_ranks


def replan(plan: Plan, transport: Transport) -> Plan:
    """Return a plan of the same model and schedule for exactly the ranks of this job.

    Links are measured; the kind of device is the given plan's.

    Raises
    ------
    InputError
        On every rank, when no plan uses exactly these ranks.
    """
    if transport.size > 1:
        cluster = measured_cluster(transport)
    else:
        alone = Level(name="alone", count=1, bandwidth_bytes_per_s=1e9)
        cluster = Cluster(name="one rank", levels=(alone,))
    if len(set(plan.cluster.devices)) == 1 and not plan.cluster.devices[0].name.startswith("cpu"):
        cluster = replace(cluster, devices=plan.cluster.devices[:1])
    made = from_rank_0(transport, lambda: plan_to_bytes(_best(plan, cluster)))
    return plan_from_bytes(made)


def _best(plan: Plan, cluster: Cluster) -> Plan:
    """Return the best plan that leaves no rank idle."""
    size = cluster.num_devices
    reasons = []
    for shape in ((), (1,) * size, (size,)):
        try:
            made = partition(plan.profile, cluster, plan.schedule, shape=shape)
        except InputError as error:
            reasons.append(str(error))
            continue
        if fits(made, size):
            return made
    raise InputError(
        f"--replan auto: no plan uses exactly {size} ranks ({'; '.join(dict.fromkeys(reasons))}):"
        f" start {plan.num_ranks}, for which the given plan is"
    )
