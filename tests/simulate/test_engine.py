"""The simulator on programs whose times are known: closed forms, rendezvous, links, reductions."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from simulated_programs import ACTIVATION, written

from pdmpi.errors import PdmpiError
from pdmpi.plan.cluster import Cluster, Level
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.program import Channel, Group, Kind, Op, Topology
from pdmpi.schedule.registry import generate
from pdmpi.simulate.costs import BUCKET_BYTES, Costs
from pdmpi.simulate.engine import simulate
from pdmpi.simulate.network import Network

TWO = Topology.straight([1, 1])


def duration(name: str, stages: int, microbatches: int, **times: float) -> float:
    choice = ScheduleChoice(name=name, microbatches=microbatches)
    program = generate(choice, Topology.straight([1] * stages), 1)
    return simulate(program, Costs.uniform(program.topology, **times)).duration_s


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 16])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_a_flush(name: str, stages: int, microbatches: int) -> None:
    """(K - 1) / (M + K - 1) of the time is idle (Huang et al. 2019, section 2.3)."""
    found = duration(name, stages, microbatches, forward_s=0.25, backward_s=0.5)
    assert found == 0.75 * (microbatches + stages - 1)
    work = 0.75 * microbatches
    assert 1 - work / found == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_asynchronous_1f1b_pays_for_filling_once(stages: int) -> None:
    program = generate(ScheduleChoice(), Topology.straight([1] * stages), 50)
    found = simulate(program, Costs.uniform(program.topology, update_s=0.5))
    # The last of 50 updates ends a forward's and a backward's way through the others later.
    assert found.duration_s == 50 * 3.5 + (stages - 1) * 3.0


def test_interleaving_divides_the_bubble() -> None:
    four = tuple((rank,) for rank in range(4))
    topology = Topology(four * 2, tuple((s, s + 1) for s in range(7)))
    program = generate(ScheduleChoice(name="interleaved", microbatches=8), topology, 1)
    found = simulate(program, Costs.uniform(topology, forward_s=0.5, backward_s=1.0))
    assert found.duration_s == 8 * 3 + 3 * 1.5


def test_zb_v_is_idle_only_while_it_fills() -> None:
    half = tuple((rank,) for rank in range(4))
    topology = Topology(half + half[::-1], tuple((s, s + 1) for s in range(7)))
    program = generate(ScheduleChoice(name="zb-v", microbatches=16), topology, 1)
    found = simulate(program, Costs.uniform(topology, forward_s=1.0, backward_s=2.0))
    assert found.duration_s == 16 * 6 + 3


def test_one_more_in_flight_hides_transfers() -> None:
    """With depth S, the period is stage time + 2 transfers; one more in flight hides them."""
    periods = []
    for extra in (0, 1):
        choice = ScheduleChoice(extra_in_flight=extra)
        program = generate(choice, Topology.straight([1, 1]), 60)
        found = simulate(program, Costs.uniform(program.topology, message_s=0.25))
        ends = found.end_s[0][program.rows[0][:, 0] == Op.BACKWARD]
        periods.append(float(ends[40] - ends[20]) / 20)
    assert periods == [3.25, 3.0]


SENDER = """
POST_SEND s0 k0 channel=0 peer=1 slot=0
FORWARD s0 k1 version=0 weights=0 input=0 output=0 saved=-1
WAIT_SEND s0 k0 channel=0 peer=1 slot=0
"""
RECEIVER = """
FORWARD s1 k1 version=0 weights=0 input=0 output=0 saved=-1
FORWARD s1 k2 version=0 weights=0 input=0 output=0 saved=-1
POST_RECV s1 k0 channel=0 peer=0 slot=0
WAIT_RECV s1 k0 channel=0 peer=0 slot=0
"""


def test_a_send_waits_for_its_receive() -> None:
    program = written(TWO, SENDER, RECEIVER)
    found = simulate(program, Costs.uniform(TWO, message_s=0.5))
    assert found.end_s[0].tolist() == [0.0, 1.0, 2.5]
    assert found.end_s[1].tolist() == [1.0, 2.0, 2.0, 2.5]
    assert (found.transfers.start_s.tolist(), found.transfers.end_s.tolist()) == ([2.0], [2.5])


def test_a_deadlock_names_who_waits() -> None:
    crossed = [
        f"POST_SEND s{s} k0 channel={s} peer={1 - s} slot=0\n"
        f"WAIT_SEND s{s} k0 channel={s} peer={1 - s} slot=0\n"
        f"POST_RECV s{s} k0 channel={1 - s} peer={1 - s} slot=0"
        for s in (0, 1)
    ]
    channels = (ACTIVATION, Channel(Kind.GRADIENT, 1, 0))
    with pytest.raises(PdmpiError, match=r"deadlocks.*rank 0 at row 1: WAIT_SEND.*rank 1 at row 1: WAIT"):
        simulate(written(TWO, *crossed, channels=channels), Costs.uniform(TWO))


def test_a_wait_without_a_post_is_refused() -> None:
    program = written(TWO, "WAIT_SEND s0 k0 channel=0 peer=1 slot=0", "")
    with pytest.raises(PdmpiError, match=r"rank 0, row 0: WAIT_SEND .* has no post"):
        simulate(program, Costs.uniform(TWO))


def fan_in(shared: bool) -> list[float]:
    """Return when two messages from one node's devices arrive at two devices of another."""
    topology = Topology(((0,), (1,), (2,), (3,)), ((0, 2), (1, 3)))
    channels = (Channel(Kind.ACTIVATION, 0, 2), Channel(Kind.ACTIVATION, 1, 3))
    texts = [f"POST_SEND s{r} k0 channel={r} peer={r + 2} slot=0" for r in (0, 1)]
    texts += [
        f"POST_RECV s{r} k0 channel={r - 2} peer={r - 2} slot=0\n"
        f"WAIT_RECV s{r} k0 channel={r - 2} peer={r - 2} slot=0"
        for r in (2, 3)
    ]
    levels = (
        Level(name="bus", count=2, bandwidth_bytes_per_s=1e12),
        Level(name="wire", count=2, bandwidth_bytes_per_s=1000.0, latency_s=0.5, shared=shared),
    )
    costs = replace(
        Costs.uniform(topology),
        message_bytes=dict.fromkeys(channels, 1000),
        network=Network(Cluster(name="two nodes", levels=levels), (0, 1, 2, 3)),
    )
    found = simulate(written(topology, *texts, channels=channels), costs)
    return [float(found.end_s[rank][-1]) for rank in (2, 3)]


def test_devices_of_a_node_share_its_card() -> None:
    assert fan_in(shared=False) == [1.5, 1.5]
    assert fan_in(shared=True) == [1.5, 3.0]


def test_a_device_sends_to_two_peers_one_after_the_other_and_receives_meanwhile() -> None:
    topology = Topology(((0,), (1,), (2,)), ((0, 1), (0, 2)))
    channels = (Channel(Kind.ACTIVATION, 0, 1), Channel(Kind.ACTIVATION, 0, 2), Channel(Kind.GRADIENT, 1, 0))
    texts = [
        "POST_SEND s0 k0 channel=0 peer=1 slot=0\nPOST_SEND s0 k0 channel=1 peer=2 slot=0\n"
        "POST_RECV s0 k0 channel=2 peer=1 slot=0\nWAIT_RECV s0 k0 channel=2 peer=1 slot=0",
        "POST_RECV s1 k0 channel=0 peer=0 slot=0\nPOST_SEND s1 k0 channel=2 peer=0 slot=0\n"
        "WAIT_RECV s1 k0 channel=0 peer=0 slot=0",
        "POST_RECV s2 k0 channel=1 peer=0 slot=0\nWAIT_RECV s2 k0 channel=1 peer=0 slot=0",
    ]
    costs = replace(Costs.uniform(topology, message_s=1.0), message_bytes=dict.fromkeys(channels, 1 << 20))
    found = simulate(written(topology, *texts, channels=channels), costs)
    assert [float(end[-1]) for end in found.end_s] == [1.0, 1.0, 2.0]


REDUCED = """
POST_REDUCE s0 k{k} group=0
BACKWARD s0 k{k} version=0 weights=0 saved=0 grad_in=-1 grad_out=-1
WAIT_REDUCE s0 k{k} group=0
"""


@pytest.mark.parametrize(
    ("buckets", "whole_s", "expected"),
    [
        (1, 1.5, 2.0 + 1.5),  # a single bucket appears at the end of the backward
        (4, 0.5, 2.0 + 0.5 / 4),  # faster than gradients appear: only the last bucket is left
        (4, 6.0, 2.0 / 4 + 6.0),  # slower: from the first bucket on, the links are busy
    ],
)
def test_a_reduction_overlaps_the_backward(buckets: int, whole_s: float, expected: float) -> None:
    topology = Topology.straight([2])
    program = written(topology, REDUCED.format(k=0), REDUCED.format(k=1), groups=[Group(0, (0, 1))])
    costs = Costs.uniform(topology)
    size = BUCKET_BYTES * buckets
    wire = Level(name="wire", count=2, bandwidth_bytes_per_s=size / whole_s)  # 2 (m - 1) / m = 1
    costs = replace(
        costs,
        stages=(replace(costs.stages[0], gradient_bytes=size),),
        network=Network(Cluster(name="pair", levels=(wire,)), (0, 1)),
    )
    found = simulate(program, costs)
    assert [float(end[-1]) for end in found.end_s] == pytest.approx([expected] * 2)


def test_the_slower_device_takes_longer() -> None:
    program = generate(ScheduleChoice(), Topology.straight([1]), 4)
    costs = replace(Costs.uniform(program.topology), speeds=(0.5,))
    assert simulate(program, costs).duration_s == 4 * 6.0


def test_an_empty_rank_and_an_empty_program() -> None:
    found = simulate(written(TWO, "", ""), Costs.uniform(TWO))
    assert found.duration_s == 0.0
    assert len(found.transfers) == 0


def test_a_thousand_stages_in_seconds() -> None:
    """1,024 ranks x 100 minibatches, in a few times what Python needs to look at their instructions."""
    begin = time.process_time()
    program = generate(ScheduleChoice(), Topology.straight([1] * 1024), 100)
    generated = time.process_time()
    operands = sum(operand >= 0 for rows in program.rows for row in rows.tolist() for operand in row)
    peer_s = time.process_time() - generated
    costs = Costs.uniform(program.topology, message_s=0.05)
    forwards = np.random.default_rng(0).uniform(0.8, 1.2, 1024)
    stages = tuple(replace(s, forward_s=f) for s, f in zip(costs.stages, forwards, strict=True))
    found = simulate(program, replace(costs, stages=stages))
    assert found.duration_s > 100 * 3
    assert operands > 1024 * 100
    assert time.process_time() - begin < 25 * peer_s
