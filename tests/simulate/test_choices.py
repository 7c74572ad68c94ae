"""Depth and schedule chosen by simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_plans import small_plan

from pdmpi.errors import InputError
from pdmpi.plan.plan import Plan, ScheduleChoice
from pdmpi.schedule.topology import topology_of
from pdmpi.simulate.auto_depth import auto_depth
from pdmpi.simulate.compare import compare
from pdmpi.simulate.forecast import adapted, forecast


def with_extra(plan: Plan, extra: int) -> Plan:
    return replace(plan, schedule=replace(plan.schedule, extra_in_flight=extra))


def test_no_extra_where_transfers_are_free() -> None:
    choice = auto_depth(small_plan(1, 1, 1, 1, bandwidth=1e15))
    assert choice.extra_in_flight == 0
    assert len(choice.tried) == 1


def test_one_extra_for_each_boundary_hides_transfers() -> None:
    plan = small_plan(1, 1, 1, 1, bandwidth=8e6)
    choice = auto_depth(plan)
    assert choice.extra_in_flight == 3
    assert choice.tried[0] > 1.3 * choice.busy_s
    assert choice.period_s == pytest.approx(choice.busy_s, rel=0.01)
    assert forecast(with_extra(plan, 3)).report.period_s == choice.period_s


def test_a_replicated_stage_needs_room_for_its_reduction() -> None:
    """Without extra ones, replicas that wait for each other's gradients empty the pipeline."""
    choice = auto_depth(small_plan(2, 1, 1))
    assert choice.extra_in_flight > 0
    assert choice.tried[0] > 1.3 * choice.period_s


def test_the_depth_stops_where_memory_ends() -> None:
    plan = small_plan(1, 1, 1, 1, bandwidth=8e6)
    need = max(rank.memory_bytes for rank in forecast(plan).report.ranks)
    devices = tuple(replace(d, memory_bytes=need) for d in plan.cluster.devices)
    tight = replace(plan, cluster=replace(plan.cluster, devices=devices))
    assert auto_depth(tight).extra_in_flight == 0


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "model-parallel"])
def test_schedules_that_flush_have_no_extra(name: str) -> None:
    plan = small_plan(1, 1, 1)
    plan = replace(plan, schedule=adapted(plan.schedule, topology_of(plan), name))
    assert auto_depth(plan).extra_in_flight == 0


def test_2bw_takes_no_more_than_it_accumulates() -> None:
    plan = small_plan(1, 1, schedule=ScheduleChoice(name="2bw", microbatches=2), bandwidth=8e6)
    assert auto_depth(plan).tried == (auto_depth(plan).period_s,)


def candidates(*names: str, memory_bytes: int = 1 << 30) -> dict[str, Plan | str]:
    plan = small_plan(1, 1, 1, 1, memory_bytes=memory_bytes)
    return {n: replace(plan, schedule=adapted(plan.schedule, topology_of(plan), n)) for n in names}


def test_the_fastest_is_chosen_and_the_reason_given() -> None:
    found = compare(candidates("gpipe", "pipedream", "model-parallel") | {"data-parallel": "too big"})
    assert found.chosen == "pipedream"
    assert [c.schedule for c in found.candidates] == ["pipedream", "gpipe", "model-parallel", "data-parallel"]
    assert "times the throughput of gpipe" in found.why
    assert "not usable: data-parallel" in found.why
    assert found.candidates[-1].note == "too big"


def test_of_equally_fast_ones_the_one_without_stale_weights() -> None:
    plans = candidates("pipedream", "gpipe")
    many = replace(plans["gpipe"].schedule, microbatches=400)
    found = compare({"pipedream": plans["pipedream"], "gpipe": replace(plans["gpipe"], schedule=many)})
    assert found.chosen == "gpipe"
    assert "without stale weights" in found.why


def test_what_does_not_fit_is_not_chosen() -> None:
    plans = candidates("pipedream", "1f1b")
    needs = {n: max(r.memory_bytes for r in forecast(p).report.ranks) for n, p in plans.items()}
    assert needs["1f1b"] < needs["pipedream"]
    where = plans["1f1b"].cluster
    devices = tuple(replace(d, memory_bytes=needs["1f1b"]) for d in where.devices)
    found = compare({n: replace(p, cluster=replace(where, devices=devices)) for n, p in plans.items()})
    assert found.chosen == "1f1b"
    assert not found.candidates[-1].usable
    assert f"needs {needs['pipedream']} bytes" in found.candidates[-1].note


def test_nothing_usable_says_why_for_each() -> None:
    with pytest.raises(InputError, match=r"gpipe: no; zb-v: neither"):
        compare({"gpipe": "no", "zb-v": "neither"})


def test_another_schedule_brings_its_microbatches() -> None:
    topology = topology_of(small_plan(2, 1, 1))
    plan = ScheduleChoice()
    assert adapted(plan, topology, "gpipe").microbatches == 16
    assert adapted(replace(plan, name="gpipe", microbatches=6), topology, "1f1b").microbatches == 6
    assert adapted(replace(plan, name="gpipe", microbatches=6), topology, "pipedream").microbatches == 1
    assert adapted(plan, topology, "gpipe", microbatches=2).microbatches == 2
    assert adapted(plan, topology, extra_in_flight=3).extra_in_flight == 3
