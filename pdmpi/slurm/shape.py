"""The shape of a job: how many ranks on how many nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdmpi.errors import InputError

__all__ = ["JobShape", "assignment", "is_placed", "shape_of", "shape_problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """Ranks, nodes, and the most ranks on one node; ranks fill the nodes in order."""

    num_ranks: int
    num_nodes: int
    ranks_per_node: int


def shape_of(nodes: Sequence[int], num_nodes: int | None = None) -> JobShape:
    """Return the shape of a job.

    Parameters
    ----------
    nodes
        The node of each rank, as the plan has it.
    num_nodes
        Nodes to use in place of the plan's.

    Raises
    ------
    InputError
        ``num_nodes`` is larger than the number of ranks.
    """
    counts = Counter(nodes)
    if num_nodes is None or num_nodes == len(counts):
        return JobShape(num_ranks=len(nodes), num_nodes=len(counts), ranks_per_node=max(counts.values()))
    if num_nodes > len(nodes):
        raise InputError(
            f"nodes = {num_nodes}: the plan has {len(nodes)} ranks; ask for at most as many nodes"
        )
    ranks_per_node = -(-len(nodes) // num_nodes)
    return JobShape(num_ranks=len(nodes), num_nodes=num_nodes, ranks_per_node=ranks_per_node)


def assignment(nodes: Sequence[int], hosts: Sequence[str]) -> tuple[int, ...] | None:
    """Choose which process plays which rank of the plan, so that each node's ranks share a host.

    Parameters
    ----------
    nodes
        The node of each of the plan's ranks.
    hosts
        The host of each process; as many.

    Returns
    -------
    tuple of int or None
        For each of the plan's ranks a process; the same number wherever that already fits.
        None when some node's ranks fit on no host.
    """
    if is_placed(nodes, hosts):
        return tuple(range(len(nodes)))
    free = {host: [p for p, own in enumerate(hosts) if own == host] for host in dict.fromkeys(hosts)}
    groups = [[rank for rank, own in enumerate(nodes) if own == node] for node in sorted(set(nodes))]
    chosen: dict[int, int] = {}
    for ranks in sorted(groups, key=len, reverse=True):
        fitting = [host for host, processes in free.items() if len(processes) >= len(ranks)]
        if not fitting:
            return None
        host = min(fitting, key=lambda name: len(free[name]))
        chosen |= dict(zip(ranks, free[host], strict=False))
        free[host] = free[host][len(ranks) :]
    return tuple(chosen[rank] for rank in range(len(nodes)))


def is_placed(nodes: Sequence[int], hosts: Sequence[str]) -> bool:
    """Tell whether the ranks of each node share a host: else heavy traffic would cross the slower link.

    Two nodes on one host are no problem.

    Parameters
    ----------
    nodes
        The node of each rank, as the plan has it.
    hosts
        The host of each rank.
    """
    return len(set(zip(nodes, hosts, strict=True))) == len(set(nodes))


def shape_problem(nodes: Sequence[int], hosts: Sequence[str]) -> str:
    """Say that a plan's nodes do not fit on hosts: both shapes, and what to do.

    Parameters
    ----------
    nodes, hosts
        As for `assignment`.
    """
    wanted, found = Counter(nodes), Counter(hosts)
    there = ", ".join(f"{host}: {count}" for host, count in found.items())
    return (
        f"the plan is for {_counted(wanted, 'node')}, this job has {_counted(found, 'host')} ({there}): start"
        " it in the plan's shape, plan for this one, or give --replan auto"
    )


def _counted(ranks: Counter[Any], what: str) -> str:
    """Return ``"2 nodes of 2 + 1 ranks"``."""
    sizes = " + ".join(map(str, sorted(ranks.values(), reverse=True)))
    plural = "s" if len(ranks) > 1 else ""
    return f"{len(ranks)} {what}{plural} of {sizes} rank{'' if sizes == '1' else 's'}"
