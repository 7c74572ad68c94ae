"""Any schedule, any shape, any costs: the simulator agrees with the oracle and keeps the invariants."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_simulation import NaiveSimulation
from simulated_programs import costs_for, programs, renumbered

from pdmpi.schedule.program import Op, Program
from pdmpi.simulate.costs import Costs
from pdmpi.simulate.engine import simulate
from pdmpi.simulate.report import COMPUTE, completions
from pdmpi.simulate.timeline import Timeline


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_equals_the_oracle(data: st.DataObject) -> None:
    program = data.draw(programs())
    costs = data.draw(costs_for(program))
    found = simulate(program, costs)
    expected = NaiveSimulation(program, costs).run()
    for rank in range(program.topology.num_ranks):
        assert found.end_s[rank] == pytest.approx([float(t) for t in expected.end[rank]], abs=1e-9)
        assert found.start_s[rank] == pytest.approx([float(t) for t in expected.start[rank]], abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_timeline_keeps_order_and_durations(data: st.DataObject) -> None:
    program = data.draw(programs())
    costs = data.draw(costs_for(program))
    found = simulate(program, costs)
    for rank, rows in enumerate(program.rows):
        assert (found.start_s[rank][1:] == found.end_s[rank][:-1]).all()
        assert (found.end_s[rank] >= found.start_s[rank]).all()
        expected = [costs.compute_s(Op(op), stage, rank) for op, stage in rows[:, :2].tolist()]
        busy = np.isin(rows[:, 0], COMPUTE)
        assert (found.end_s[rank] - found.start_s[rank])[busy] == pytest.approx(np.array(expected)[busy])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_never_below_the_bounds(data: st.DataObject) -> None:
    program = data.draw(programs())
    costs = data.draw(costs_for(program))
    found = simulate(program, costs)
    tolerance = 1 + 1e-12
    for rank, rows in enumerate(program.rows):
        work = sum(costs.compute_s(Op(op), stage, rank) for op, stage in rows[:, :2].tolist())
        assert found.duration_s * tolerance >= work
    ended = completions(found)
    for k in range(program.num_microbatches):
        assert ended[k] * tolerance >= _path_s(program, costs, k)
    assert _busiest_link_s(found, costs) <= found.duration_s * tolerance


def _path_s(program: Program, costs: Costs, microbatch: int) -> float:
    """Return the seconds of one microbatch alone: through all stages and back, messages included."""
    ranks = [program.topology.rank(s, microbatch) for s in range(program.topology.num_stages)]
    split = any((rows[:, 0] == Op.BACKWARD_INPUT).any() for rows in program.rows)
    ops = (Op.FORWARD, Op.BACKWARD_INPUT if split else Op.BACKWARD)
    work = sum(costs.compute_s(op, s, rank) for s, rank in enumerate(ranks) for op in ops)
    messages = (
        costs.network.message_s(ranks[c.source_stage], ranks[c.target_stage], nbytes)
        for c, nbytes in costs.message_bytes.items()
    )
    return work + sum(messages)


def _busiest_link_s(found: Timeline, costs: Costs) -> float:
    """Return the seconds of the busiest link; fails where two messages are on a link at once."""
    by_link: dict[object, list[tuple[float, float]]] = {}
    moves = found.transfers
    for source, target, start, end in zip(
        moves.source.tolist(),
        moves.target.tolist(),
        moves.start_s.tolist(),
        moves.end_s.tolist(),
        strict=True,
    ):
        if end > start:
            for link in costs.network.links(source, target):
                by_link.setdefault(link, []).append((start, end))
    for spans in by_link.values():
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(sorted(spans)))
    return max((sum(end - start for start, end in spans) for spans in by_link.values()), default=0.0)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_numbers_of_ranks_do_not_matter(data: st.DataObject) -> None:
    program = data.draw(programs())
    costs = data.draw(costs_for(program))
    new = data.draw(st.permutations(range(program.topology.num_ranks)))
    found = simulate(program, costs)
    moved = simulate(*renumbered(program, costs, new))
    for rank in range(program.topology.num_ranks):
        assert np.array_equal(moved.end_s[new[rank]], found.end_s[rank])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_without_shared_links_nothing_gets_earlier_when_a_cost_grows(data: st.DataObject) -> None:
    program = data.draw(programs())
    costs = data.draw(costs_for(program, contended=False))
    stage = data.draw(st.integers(0, program.topology.num_stages - 1))
    field = data.draw(st.sampled_from(["forward_s", "backward_s", "update_s", "gradient_bytes"]))
    grown = list(costs.stages)
    grown[stage] = replace(
        grown[stage], **{field: getattr(grown[stage], field) * 2 + (1 << 20) * ("bytes" in field)}
    )
    before, after = simulate(program, costs), simulate(program, replace(costs, stages=tuple(grown)))
    if field == "gradient_bytes" and costs.buckets(stage) != 1:
        return  # more buckets leave earlier
    for a, b in zip(before.end_s, after.end_s, strict=True):
        assert (b >= a - 1e-9).all()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_twice_the_costs_take_twice_the_time(data: st.DataObject) -> None:
    program = data.draw(programs())
    costs = data.draw(costs_for(program, contended=False))
    slower = replace(costs, speeds=tuple(speed / 2 for speed in costs.speeds))
    if any(stage.gradient_bytes for stage in costs.stages):
        return
    for a, b in zip(simulate(program, costs).end_s, simulate(program, slower).end_s, strict=True):
        assert b == pytest.approx(2 * a)
