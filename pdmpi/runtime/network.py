"""Whether the network is the one that the plan was made for: links between hosts, measured at the start."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pdmpi.plan.links import Links
from pdmpi.plan.plan import Plan
from pdmpi.transport.base import Transport
from pdmpi.transport.exchange import Exchange, measure_exchanges

__all__ = ["Crossing", "crossings", "network_notes"]

_FAR_OFF = 2.0


@dataclass(frozen=True, slots=True)
class Crossing:
    """Two ranks on different hosts between which a plan moves data.

    Attributes
    ----------
    what
        ``"stage 0 to 1"`` for a boundary, ``"the replicas of stage 0"`` for their allreduce.
    source, target
        The ranks.
    level
        The cluster's level that the plan takes their link for.
    bandwidth_bytes_per_s
        What the plan expects of it, each way at once.
    """

    what: str
    source: int
    target: int
    level: str
    bandwidth_bytes_per_s: float


def crossings(plan: Plan, hosts: Sequence[str]) -> list[Crossing]:
    """Return the links between hosts that a plan uses, one a boundary and one a replicated stage.

    Parameters
    ----------
    plan
        With its ranks placed.
    hosts
        Name of each rank's host.
    """
    ranks = [[plan.rank_of(s, r) for r in range(stage.replicas)] for s, stage in enumerate(plan.stages)]
    used = []
    for source, target in sorted(plan.boundaries):
        pairs = [(a, b) for a in ranks[source] for b in ranks[target]]
        used.append((f"stage {source} to {target}", pairs))
    for stage, group in enumerate(ranks):
        used.append((f"the replicas of stage {stage}", list(itertools.pairwise(group))))
    device_of = {p.rank: p.node * plan.cluster.devices_per_node + p.device for p in plan.placement}
    prices = Links(plan.cluster)
    found: dict[frozenset[str], Crossing] = {}
    for what, pairs in used:
        between = next((pair for pair in pairs if hosts[pair[0]] != hosts[pair[1]]), None)
        if between is None or frozenset(hosts[rank] for rank in between) in found:
            continue
        level = prices.level(*(device_of[rank] for rank in between))
        slowest = min(plan.cluster.levels[: level + 1], key=lambda link: link.bandwidth_bytes_per_s)
        crossing = Crossing(what, *between, slowest.name, slowest.bandwidth_bytes_per_s)
        found[frozenset(hosts[rank] for rank in between)] = crossing
    return list(found.values())


def network_notes(plan: Plan, transport: Transport, hosts: Sequence[str]) -> list[str]:
    """Measure a plan's links between hosts, and return the line that a person should know, if any.

    Every rank calls it at the same time; it takes a fraction of a second a round of links.
    """
    links = crossings(plan, hosts)
    if not links:
        return []
    measured = measure_exchanges(
        transport,
        [(link.source, link.target) for link in links],
        hosts,
        [link.bandwidth_bytes_per_s for link in links],
    )
    off = [pair for pair in zip(links, measured, strict=True) if _factor(*pair) > _FAR_OFF]
    if not off:
        return []
    link, found = max(off, key=lambda pair: _factor(*pair))
    a, b = (f"rank {rank} on {hosts[rank]}" for rank in (link.source, link.target))
    slower = found.bandwidth_bytes_per_s < link.bandwidth_bytes_per_s
    off_by = f"{_factor(link, found):.1f} times {'slower' if slower else 'faster'}"
    others = f" (and {len(off) - 1} more)" if len(off) > 1 else ""
    return [
        f"warning: the network is {off_by} than the plan's: {link.what} ({a}, {b}) moves "
        f"{_megabytes(found)} each way at once, the plan's {link.level!r} {_megabytes(link)}{others}; "
        f"measure it (mpirun -n {transport.size} pdmpi cluster) and plan again"
        + (", or choose another interface for MPI" if slower else "")
    ]


def _factor(expected: Crossing, found: Exchange) -> float:
    ratio = found.bandwidth_bytes_per_s / expected.bandwidth_bytes_per_s
    return max(ratio, 1 / ratio)


def _megabytes(link: Crossing | Exchange) -> str:
    return f"{link.bandwidth_bytes_per_s / 1e6:.4g} MB/s"
