"""A plan's forecast: its program, simulated with its own costs and summed up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdmpi.plan.depth import in_flight_depth
from pdmpi.plan.plan import Plan, ScheduleChoice
from pdmpi.plan.terms import terms_of
from pdmpi.schedule.program import Program, Topology
from pdmpi.schedule.registry import program_of
from pdmpi.schedule.topology import topology_of
from pdmpi.simulate.costs import Costs, costs_of
from pdmpi.simulate.engine import simulate
from pdmpi.simulate.report import Report, summarise
from pdmpi.simulate.timeline import Timeline

__all__ = ["Forecast", "adapted", "forecast", "memory_limits", "steady_minibatches"]

_FLUSHED_MINIBATCHES = 6
_STEADY_DEPTHS = 8
_STEADY_ROUNDS = 12
_STEADY_LONG_ROUNDS = 6
_MICROBATCHES_A_RANK = 4
"""From here on a flush costs little (Huang et al., GPipe, NeurIPS 2019, section 2.3)."""


@dataclass(frozen=True)
class Forecast:
    """What a plan is expected to do.

    Attributes
    ----------
    timeline
        Of the plan's program.
    costs
        The plan's costs.
    report
        What the timeline says.
    """

    timeline: Timeline
    costs: Costs
    report: Report

    @property
    def program(self) -> Program:
        """The program that was simulated."""
        return self.timeline.program


def forecast(plan: Plan, num_minibatches: int = 0) -> Forecast:
    """Simulate a plan.

    Parameters
    ----------
    plan
        The plan.
    num_minibatches
        Minibatches to simulate; 0 for as many as reach the steady state.

    Raises
    ------
    InputError
        When the schedule does not take the plan's shape or this number of minibatches.
    """
    program = program_of(plan, num_minibatches or steady_minibatches(plan.schedule, topology_of(plan)))
    costs = costs_of(plan)
    timeline = simulate(program, costs)
    return Forecast(timeline, costs, summarise(timeline, costs, plan.profile.microbatch_size))


def steady_minibatches(choice: ScheduleChoice, topology: Topology) -> int:
    """Return how many minibatches reach the steady state, and show it for a while."""
    terms = terms_of(choice)
    if terms.flushes and terms.accumulates:
        return _FLUSHED_MINIBATCHES
    deepest = in_flight_depth(topology.replicas, choice.extra_in_flight)[0] * topology.replicas[0]
    least = _STEADY_ROUNDS if topology.round <= deepest else _STEADY_LONG_ROUNDS
    rounds = max(-(-_STEADY_DEPTHS * deepest // topology.round), least)
    return rounds if terms.accumulates else rounds * topology.round


def adapted(
    choice: ScheduleChoice,
    topology: Topology,
    name: str | None = None,
    microbatches: int | None = None,
    extra_in_flight: int | None = None,
) -> ScheduleChoice:
    """Return a plan's choice with other parameters; ``None`` keeps its own.

    Where another schedule needs another number of microbatches and none is given, it is 1
    for schedules that step after every minibatch, and else four for each rank.
    """
    name = name or choice.name
    if microbatches is None:
        microbatches = choice.microbatches
        if name != choice.name and not terms_of(replace(choice, name=name)).accumulates:
            microbatches = 1
        elif name != choice.name and microbatches == 1:
            fitting = -(-_MICROBATCHES_A_RANK * topology.num_ranks // topology.round)
            microbatches = fitting * topology.round
    extra = choice.extra_in_flight if extra_in_flight is None else extra_in_flight
    return replace(choice, name=name, microbatches=microbatches, extra_in_flight=extra)


def memory_limits(plan: Plan) -> tuple[int, ...]:
    """Return the bytes of memory of each rank's device; 0 where it is not known."""
    cluster = plan.cluster
    devices = {p.rank: p.node * cluster.devices_per_node + p.device for p in plan.placement}
    return tuple(cluster.device(devices[rank]).memory_bytes for rank in range(plan.num_ranks))
