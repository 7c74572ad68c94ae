"""The plan that the ranks of a job run: placed on their hosts, or made again for them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from pdmpi.errors import InputError
from pdmpi.plan.cluster import Cluster, Level
from pdmpi.plan.partition import partition
from pdmpi.plan.plan import Plan
from pdmpi.plan.store import plan_from_bytes, plan_to_bytes
from pdmpi.runtime.agree import from_rank_0
from pdmpi.runtime.cluster import measured_cluster
from pdmpi.slurm.shape import assignment, placement_problems
from pdmpi.transport.base import Transport

__all__ = ["fitted"]


def fitted(plan: Plan, transport: Transport, again: bool, notice: Callable[[str], None]) -> Plan:
    """Return the plan for the ranks that are there; every rank calls it at the same time.

    Ranks are renumbered where that puts each of the plan's nodes on one host.  Otherwise,
    and for another number of ranks, the plan is made again if that is allowed; if it is
    not, a plan spread over hosts runs with a notice, and one for another number of ranks is
    returned as it is, to be refused with all else that does not fit.

    Parameters
    ----------
    plan
        As read.
    transport
        Of this rank.
    again
        Whether it may be planned again.
    notice
        Called with lines that a person should know.

    Raises
    ------
    InputError
        On every rank, when no plan uses exactly these ranks.
    """
    parts = [part.decode() for part in transport.gather(socket.gethostname().encode())]
    hosts: list[str] = json.loads(transport.broadcast(json.dumps(parts).encode()))
    if plan.num_ranks == len(hosts):
        placed = _placed(plan, hosts)
        if placed is not None:
            return placed
        for problem in placement_problems(_nodes(plan), hosts):
            notice(problem)
    if not again:
        return plan
    made = _made_again(plan, transport)
    shape = "-".join(str(stage.replicas) for stage in made.stages)
    notice(f"planned again for {len(hosts)} ranks: {shape}")
    return _placed(made, hosts) or made


def _placed(plan: Plan, hosts: Sequence[str]) -> Plan | None:
    """Return the plan with its ranks numbered as the processes that should play them."""
    processes = assignment(_nodes(plan), hosts)
    if processes is None:
        return None
    return replace(plan, placement=tuple(replace(p, rank=processes[p.rank]) for p in plan.placement))


def _nodes(plan: Plan) -> list[int]:
    node_of = {place.rank: place.node for place in plan.placement}
    return [node_of[rank] for rank in range(plan.num_ranks)]


def _made_again(plan: Plan, transport: Transport) -> Plan:
    """Return a plan of the same model and schedule for exactly the ranks of this job.

    Links are measured; the kind of device is the given plan's.
    """
    if transport.size > 1:
        cluster = measured_cluster(transport)
    else:
        alone = Level(name="alone", count=1, bandwidth_bytes_per_s=1e9)
        cluster = Cluster(name="one rank", levels=(alone,))
    if len(set(plan.cluster.devices)) == 1 and not plan.cluster.devices[0].name.startswith("cpu"):
        cluster = replace(cluster, devices=plan.cluster.devices[:1])
    return plan_from_bytes(from_rank_0(transport, lambda: plan_to_bytes(_best(plan, cluster))))


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
        if made.num_ranks == size:
            return made
    raise InputError(
        f"--replan auto: no plan uses exactly {size} ranks ({'; '.join(dict.fromkeys(reasons))}):"
        f" start {plan.num_ranks}, for which the given plan is"
    )
