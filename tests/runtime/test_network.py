"""Which links between hosts a plan uses, and what is said of those that are not as fast as planned."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from harness import make_plan, run_config

from pdmpi.plan.cluster import Cluster, Level
from pdmpi.plan.plan import Plan
from pdmpi.runtime import network
from pdmpi.runtime.network import crossings, network_notes
from pdmpi.transport.exchange import Exchange, measure_exchanges, rounds_of
from pdmpi.transport.local import LocalWorld


def plan_over(replicas: tuple[int, ...], bandwidth: float, per_host: int = 1) -> Plan:
    plan = make_plan(run_config("conv"), replicas)
    ranks = sum(replicas)
    levels = (
        Level(name="bus", count=per_host, bandwidth_bytes_per_s=1e12),
        Level(name="network", count=ranks // per_host, bandwidth_bytes_per_s=bandwidth),
    )
    return replace(plan, cluster=Cluster(name="t", levels=levels))


@pytest.mark.parametrize(
    ("replicas", "hosts", "expected"),
    [
        ((1, 1), "aa", []),
        ((1, 1), "ab", [("stage 0 to 1", 0, 1)]),
        ((1, 1, 1, 1), "aabb", [("stage 1 to 2", 1, 2)]),
        ((1, 1, 1), "abc", [("stage 0 to 1", 0, 1), ("stage 1 to 2", 1, 2)]),
        ((2,), "ab", [("the replicas of stage 0", 0, 1)]),
        ((2, 1), "abb", [("stage 0 to 1", 0, 2)]),
    ],
)
def test_links_between_hosts(
    replicas: tuple[int, ...], hosts: str, expected: list[tuple[str, int, int]]
) -> None:
    found = crossings(plan_over(replicas, 1e9), hosts)
    assert [(link.what, link.source, link.target) for link in found] == expected
    assert all(link.level == "network" for link in found)


def test_a_host_measures_one_link_at_a_time() -> None:
    pairs = [(0, 1), (1, 2), (2, 3), (0, 3)]
    assert rounds_of(pairs, "abcd") == [[(0, 1), (2, 3)], [(1, 2), (0, 3)]]


def test_all_ranks_know_what_was_measured() -> None:
    pairs = [(0, 1), (1, 2)]
    found = LocalWorld(3).run(lambda transport: measure_exchanges(transport, pairs, "abc", [0.0, 0.0]))
    assert found[0] == found[1] == found[2]
    assert [(link.source, link.target) for link in found[0]] == pairs
    assert all(link.bandwidth_bytes_per_s > 0 for link in found[0])


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (0.8e8, ""),
        (1.9e8, ""),
        (1e7, "10.0 times slower than the plan's: stage 0 to 1 (rank 0 on a, rank 1 on b) moves 10 MB/s"),
        (5e8, "5.0 times faster than the plan's: stage 0 to 1 (rank 0 on a, rank 1 on b) moves 500 MB/s"),
    ],
)
def test_what_is_said_of_a_link(monkeypatch: pytest.MonkeyPatch, measured: float, said: str) -> None:
    monkeypatch.setattr(network, "measure_exchanges", lambda *_: [Exchange(0, 1, measured)])
    notes = network_notes(plan_over((1, 1), 1e8), SimpleNamespace(size=2), "ab")  # type: ignore[arg-type]
    assert len(notes) == bool(said)
    for line in notes:
        assert said in line
        assert "the plan's 'network' 100 MB/s" in line
        assert "(mpirun -n 2 pdmpi cluster) and plan again" in line
