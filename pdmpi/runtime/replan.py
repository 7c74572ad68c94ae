"""The plan that the ranks of a job run: placed on their hosts, or made again for them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from pdmpi.config.run import ScheduleConfig
from pdmpi.errors import InputError
from pdmpi.plan.cluster import Cluster, Level
from pdmpi.plan.partition import partition, shortlist
from pdmpi.plan.plan import Plan
from pdmpi.plan.store import plan_from_bytes, plan_to_bytes
from pdmpi.runtime.agree import from_rank_0
from pdmpi.runtime.cluster import measured_cluster
from pdmpi.simulate.settle import best_settled
from pdmpi.slurm.shape import assignment, shape_problem
from pdmpi.transport.base import Transport
from pdmpi.transport.share import share

__all__ = ["fitted"]


def fitted(
    plan: Plan,
    transport: Transport,
    again: bool,
    asked: ScheduleConfig,
    notice: Callable[[str], None],
    device: torch.device,
) -> Plan:
    """Return the plan for the ranks that are there; every rank calls it at the same time.

    Ranks are renumbered where that puts each of the plan's nodes on one host.  Otherwise,
    and for another number of ranks, the plan is made again if that is allowed.  If it is
    not, one for another number of ranks is returned as it is, to be refused with all else
    that does not fit.

    Parameters
    ----------
    plan
        As read.
    transport
        Of this rank.
    again
        Whether it may be planned again.
    asked
        What the configuration fixes of the schedule of a plan that is made again.
    notice
        Called with lines that a person should know.
    device
        Where this rank computes.

    Raises
    ------
    InputError
        On every rank, when the plan's nodes fit on no hosts, or no plan uses exactly these ranks.
    """
    hosts: list[str] = share(transport, socket.gethostname())
    if plan.num_ranks == len(hosts):
        placed = _placed(plan, hosts)
        if placed is not None:
            return placed
        if not again:
            raise InputError(shape_problem(plan.nodes, hosts))
    if not again:
        return plan
    made = _made_again(plan, transport, asked, device)
    shape = "-".join(str(stage.replicas) for stage in made.stages)
    notice(f"planned again for {len(hosts)} ranks: {shape}")
    return _placed(made, hosts) or made


def _placed(plan: Plan, hosts: Sequence[str]) -> Plan | None:
    """Return the plan with its ranks numbered as the processes that should play them."""
    processes = assignment(plan.nodes, hosts)
    if processes is None:
        return None
    return replace(plan, placement=tuple(replace(p, rank=processes[p.rank]) for p in plan.placement))


def _made_again(plan: Plan, transport: Transport, asked: ScheduleConfig, device: torch.device) -> Plan:
    """Return a plan of the same model and schedule for exactly the ranks of this job.

    Links are measured; the kind of device is the given plan's.
    """
    if transport.size > 1:
        cluster = measured_cluster(transport, device)
    else:
        alone = Level(name="alone", count=1, bandwidth_bytes_per_s=1e9)
        cluster = Cluster(name="one rank", levels=(alone,))
    if len(set(plan.cluster.devices)) == 1 and not plan.cluster.devices[0].name.startswith("cpu"):
        cluster = replace(cluster, devices=plan.cluster.devices[:1])
    return plan_from_bytes(from_rank_0(transport, lambda: plan_to_bytes(_best(plan, cluster, asked))))


def _best(plan: Plan, cluster: Cluster, asked: ScheduleConfig) -> Plan:
    """Return the plan that the simulator finds fastest of those that leave no rank idle.

    The depth is chosen anew, and so is which stages recompute, unless the configuration fixes them.
    """
    size = cluster.num_devices
    given = asked.model_fields_set
    choice = replace(plan.schedule, recompute=asked.recompute if "recompute" in given else "auto")
    fixed = "extra_in_flight" in given and asked.extra_in_flight != "auto"
    extra = int(asked.extra_in_flight) if fixed else None
    makers: tuple[Callable[[], list[Plan]], ...] = (
        lambda: shortlist(plan.profile, cluster, choice),
        lambda: [partition(plan.profile, cluster, choice, shape=(1,) * size)],
        lambda: [partition(plan.profile, cluster, choice, shape=(size,))],
    )
    reasons = []
    for make in makers:
        try:
            whole = [made for made in make() if made.num_ranks == size]
            if whole:
                return best_settled(whole, extra)[0]
        except InputError as error:
            reasons.append(str(error))
    raise InputError(
        f"--replan auto: no plan uses exactly {size} ranks ({'; '.join(dict.fromkeys(reasons))}):"
        f" start {plan.num_ranks}, for which the given plan is"
    )
