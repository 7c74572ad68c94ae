"""The topology of a plan: which rank plays which replica of which stage, and who feeds whom."""

from __future__ import annotations

from pdmpi.errors import InputError
from pdmpi.plan.plan import Plan
from pdmpi.schedule.program import Topology

__all__ = ["topology_of"]


def topology_of(plan: Plan) -> Topology:
    """Return stages, ranks and edges of a plan.

    An edge carries no gradient where none of its values needs one, or where no layer at or
    before its source is trained.

    Raises
    ------
    InputError
        When the placement leaves out a replica, or places one twice.
    """
    places = {(p.stage, p.replica): p.rank for p in plan.placement}
    wanted = {(s, r) for s, stage in enumerate(plan.stages) for r in range(stage.replicas)}
    problems = [f"plan places replica {r} of stage {s} nowhere" for s, r in sorted(wanted - set(places))]
    problems += [
        f"plan places replica {r} of stage {s}, which has fewer" for s, r in sorted(set(places) - wanted)
    ]
    if len(places) != len(plan.placement):
        problems.append("plan places a replica twice")
    InputError.collect(problems)
    ranks = tuple(tuple(places[s, r] for r in range(stage.replicas)) for s, stage in enumerate(plan.stages))
    boundaries = plan.boundaries
    graph = plan.profile.graph
    no_gradient = frozenset(
        pair for pair, refs in boundaries.items() if not any(map(graph.returns_gradient, refs))
    )
    return Topology(ranks, tuple(boundaries), no_gradient)
