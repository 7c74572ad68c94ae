"""Cluster files: those that come with the project, units, and everything that is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import CLUSTERS

from pdmpi.errors import InputError
from pdmpi.plan.cluster_file import load_cluster, parse_cluster
from pdmpi.plan.units import parse_bandwidth, parse_bytes, parse_seconds

GOOD = """
name = "two"
devices_per_node = 2
num_devices = 4
[[levels]]
name = "nvlink"
count = 2
bandwidth = "30 GB/s"
latency = "5 us"
[[levels]]
name = "ethernet"
count = 2
bandwidth = "10 Gbps"
shared = true
[[devices]]
name = "fast"
memory = "16 GiB"
count = 1
[[devices]]
name = "slow"
memory = 8_000_000_000
relative_speed = 0.5
count = 3
"""


def test_every_file_of_the_project_loads():
    found = {path.stem: load_cluster(path) for path in CLUSTERS.glob("*.toml")}
    assert {"a-4x4", "b-2x8", "c-4x1", "laptop", "h100-1x8", "h100-8x8", "a100-4x4"} <= set(found)
    assert all(name == cluster.name for name, cluster in found.items())
    assert [level.bandwidth_bytes_per_s for level in found["a-4x4"].levels] == [1e10, 1.25e9]


def test_what_a_file_says():
    cluster = parse_cluster(GOOD)
    assert cluster.num_devices == 4
    assert [level.bandwidth_bytes_per_s for level in cluster.levels] == [3e10, 1.25e9]
    assert [level.latency_s for level in cluster.levels] == [pytest.approx(5e-6), 0.0]
    assert [cluster.device(i).name for i in range(4)] == ["fast", "slow", "slow", "slow"]
    assert cluster.device(3).memory_bytes == 8_000_000_000
    assert [cluster.level_between(0, d) for d in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('count = 2\nbandwidth = "30', 'count = 0\nbandwidth = "30', "levels.0.count"),
        ("num_devices = 4", "num_devices = 5", "num_devices = 5, but the levels' counts multiply to 4"),
        ("shared = true", "shard = true", "unknown key 'shard' in .*levels.*did you mean 'shared'"),
        ('name = "two"', 'nme = "two"', "did you mean 'name'"),
        ('"10 Gbps"', '"10 parsecs"', "'10 parsecs' is no quantity; write e.g. '10 Gbps'"),
        ('"10 Gbps"', '"0 Gbps"', "levels.1.bandwidth"),
        ('"10 Gbps"', "nan", "must be finite"),
        ('"10 Gbps"', "-5.0", "not negative"),
        ("devices_per_node = 2", "devices_per_node = 3", "does not divide the 4 devices"),
        ("count = 3", "count = 4", "add up to 5, the levels give 4"),
        ("count = 3", "", "give every kind in .* a count"),
        ("relative_speed = 0.5", "relative_speed = 0", "relative_speed"),
        ("relative_speed = 0.5", "relative_speed = inf", "relative_speed"),
        ('memory = "16 GiB"', "", "devices.0.memory is missing"),
        ("[[levels]]", "[[levels", "is no TOML"),
        ("num_devices = 4", "num_devices = true", "num_devices"),
    ],
)
def test_bad_files(old, new, message):
    assert old in GOOD
    with pytest.raises(InputError, match=message):
        parse_cluster(GOOD.replace(old, new, 1))


def test_all_problems_are_told_at_once():
    with pytest.raises(InputError, match=r"shard.*no quantity"):
        parse_cluster(
            GOOD.replace("shared", "shard").replace('"16 GiB"', '"16 Gx"').replace("10 Gbps", "1 Gbits")
        )


def test_no_file(tmp_path):
    with pytest.raises(InputError, match="cannot read cluster file"):
        load_cluster(tmp_path / "none.toml")


def test_units():
    assert parse_bandwidth("400 Gbit/s") == 5e10
    assert parse_bandwidth(12.5) == 12.5
    assert parse_bytes("1.5 GiB") == 3 << 29
    assert parse_seconds("20 us") == pytest.approx(2e-5)


@given(st.text(max_size=12))
def test_any_other_text_is_no_quantity(text):
    try:
        assert parse_bytes(text) >= 0
    except InputError:
        pass
