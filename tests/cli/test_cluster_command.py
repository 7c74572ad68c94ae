from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch import PDMPI, mpirun

from pdmpi.errors import InputError
from pdmpi.plan.cluster import Cluster, Device, Level
from pdmpi.plan.cluster_file import load_cluster, parse_cluster
from pdmpi.plan.cluster_text import cluster_to_text
from pdmpi.plan.links import Links
from pdmpi.runtime import cluster as measuring
from pdmpi.runtime.cluster import measured_cluster
from pdmpi.runtime.sum_costs import SUM_BYTES
from pdmpi.transport.local import LocalTransport, LocalWorld
from pdmpi.transport.share import share

LEVELS = st.builds(
    Level,
    name=st.sampled_from(["nvlink", "ethernet", 'a "quoted" name']),
    count=st.integers(1, 8),
    bandwidth_bytes_per_s=st.floats(1e6, 1e12),
    latency_s=st.floats(0, 1e-2),
    shared=st.booleans(),
    allreduce_efficiency=st.floats(0.01, 10),
    allreduce_work_s_per_byte=st.sampled_from([0.0, 4.7e-9, 1e-12]),
)


@given(st.lists(LEVELS, min_size=1, max_size=3), st.integers(1, 1 << 40), st.floats(0.01, 10))
def test_what_is_written_is_read_back(levels: list[Level], memory: int, speed: float) -> None:
    device = Device(memory_bytes=memory, relative_speed=speed)
    cluster = Cluster(name="here", levels=tuple(levels), devices=(device,), devices_per_node=levels[0].count)
    back = parse_cluster(cluster_to_text(cluster, "for a test"))
    assert back.num_devices == cluster.num_devices
    for found, written in zip(back.levels, levels, strict=True):
        assert (found.name, found.count, found.shared) == (written.name, written.count, written.shared)
        assert found.bandwidth_bytes_per_s == pytest.approx(written.bandwidth_bytes_per_s, rel=1e-4)
        assert found.latency_s == pytest.approx(written.latency_s, rel=1e-4, abs=1e-15)
        assert found.allreduce_efficiency == pytest.approx(written.allreduce_efficiency, rel=1e-2)
        assert found.allreduce_work_s_per_byte == pytest.approx(written.allreduce_work_s_per_byte, rel=1e-2)
    assert back.device(0).memory_bytes == pytest.approx(memory, rel=1e-4, abs=1)
    assert back.device(0).relative_speed == pytest.approx(speed, rel=1e-2)


def on_hosts(monkeypatch: pytest.MonkeyPatch, hosts: list[str]) -> list[Cluster]:
    """Measure on ranks that are threads and believe to be on these hosts."""

    def renamed(transport: LocalTransport, mine: Any) -> list[Any]:
        return share(transport, hosts[transport.rank] if mine == "real" else mine)

    monkeypatch.setattr(measuring, "share", renamed)
    monkeypatch.setattr(measuring.socket, "gethostname", lambda: "real")
    monkeypatch.setattr(measuring, "_ALONE_S", 0.02)
    monkeypatch.setattr(measuring, "_TOGETHER_S", 0.02)
    return LocalWorld(len(hosts)).run(measured_cluster)


def test_two_hosts_of_two_ranks_are_two_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = on_hosts(monkeypatch, ["a", "a", "b", "b"])
    assert len(set(clusters)) == 1
    assert [(level.name, level.count, level.shared) for level in clusters[0].levels] == [
        ("shared-memory", 2, False),
        ("network", 2, True),
    ]
    assert clusters[0].devices_per_node == 2
    assert 0 < clusters[0].device(0).relative_speed <= 1
    assert all(level.bandwidth_bytes_per_s > 0 for level in clusters[0].levels)


def test_a_sum_is_priced_as_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latencies, which are priced too, are not counted twice."""
    monkeypatch.setattr(
        measuring,
        "measure_sum",
        lambda transport, groups, device: (0.25 * len(groups[0]), 0.1 * len(groups[0])),
    )
    cluster = on_hosts(monkeypatch, ["a", "a", "b", "b"])[0]
    links = Links(cluster)
    assert links.allreduce_s([0, 1], SUM_BYTES) == pytest.approx(0.5, rel=1e-2)
    assert links.allreduce_s([0, 1, 2, 3], SUM_BYTES) == pytest.approx(1.0, rel=1e-2)
    assert links.allreduce_work_s([0, 1], SUM_BYTES) == pytest.approx(0.2, rel=1e-2)
    assert links.allreduce_work_s([0, 1, 2, 3], SUM_BYTES) == pytest.approx(0.4, rel=1e-2)
    assert links.allreduce_work_s([2], SUM_BYTES) == 0.0


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (["a"], "one rank has no links"),
        (["a", "a", "b"], "different numbers of ranks \\(a: 2, b: 1\\)"),
        (["a", "b", "a", "b"], "map them by slot"),
    ],
)
def test_what_cannot_be_measured(monkeypatch: pytest.MonkeyPatch, hosts: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        on_hosts(monkeypatch, hosts)


@pytest.mark.mpi
def test_a_real_job_writes_a_file_that_plans_can_use(tmp_path: Path) -> None:
    output = tmp_path / "cluster.toml"
    done = mpirun(2, [*PDMPI, "cluster", "-o", output, "--device", "cpu", "--json"])
    shown = json.loads(done.stdout)
    cluster = load_cluster(output)
    assert cluster.num_devices == 2
    assert cluster.device(0).name == "cpu"
    assert cluster.levels[0].allreduce_work_s_per_byte > 0
    assert shown["levels"][0]["allreduce_efficiency"] == cluster.levels[0].allreduce_efficiency
    assert shown["levels"][0]["bandwidth_bytes_per_s"] == pytest.approx(
        cluster.levels[0].bandwidth_bytes_per_s, rel=1e-4
    )
    again = mpirun(2, [*PDMPI, "cluster", "-o", output], check=False)
    assert again.returncode == 2
    assert "exists" in again.stderr
