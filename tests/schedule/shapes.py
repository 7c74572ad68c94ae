"""Topologies, choices and strategies that the tests of schedules share."""

from __future__ import annotations

from hypothesis import strategies as st

from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.program import Topology
from pdmpi.schedule.registry import SCHEDULES

ASYNCHRONOUS = ("pipedream", "pipedream-vsync")
WITH_DEPTH = ("pipedream", "pipedream-vsync", "2bw", "1f1b", "zb-h1")


def dealt(places: list[int], replicas: int = 1) -> Topology:
    """Stages on the given places, each of them ``replicas`` ranks."""
    ranks = tuple(tuple(range(p * replicas, (p + 1) * replicas)) for p in places)
    return Topology(ranks, tuple((s, s + 1) for s in range(len(places) - 1)))


def loop(num_places: int, chunks: int, replicas: int = 1) -> Topology:
    return dealt([s % num_places for s in range(num_places * chunks)], replicas)


def vee(half: int, replicas: int = 1) -> Topology:
    return dealt([min(s, 2 * half - 1 - s) for s in range(2 * half)], replicas)


def straight(*replicas: int) -> Topology:
    return Topology.straight(replicas)


@st.composite
def with_skips(draw: st.DrawFn, topology: Topology) -> Topology:
    """The topology with edges that skip stages, some of which carry no gradient."""
    far = [(a, b) for a in range(topology.num_stages) for b in range(a + 2, topology.num_stages)]
    if not far:
        return topology
    added = draw(st.lists(st.sampled_from(far), unique=True, max_size=3))
    silent = [edge for edge in added if draw(st.booleans())]
    return Topology(topology.ranks, tuple(sorted({*topology.edges, *added})), frozenset(silent))


@st.composite
def cases(
    draw: st.DrawFn,
    names: tuple[str, ...] = tuple(SCHEDULES),
    max_stages: int = 6,
    max_microbatches: int = 40,
) -> tuple[ScheduleChoice, Topology, int]:
    """A schedule's choice, a topology that it takes, and a number of minibatches."""
    name = draw(st.sampled_from(names))
    replicas = st.integers(1, 4)
    if name == "data-parallel":
        topology = straight(draw(replicas))
    elif name == "model-parallel":
        topology = straight(*[1] * draw(st.integers(1, max_stages)))
    elif name == "interleaved":
        topology = loop(
            draw(st.integers(1, 3)), draw(st.integers(1, max_stages // 2)), draw(st.integers(1, 2))
        )
    elif name == "zb-v":
        topology = vee(draw(st.integers(1, max_stages // 2)), draw(st.integers(1, 2)))
    else:
        topology = straight(*draw(st.lists(replicas, min_size=1, max_size=max_stages)))
    if draw(st.booleans()):
        topology = draw(with_skips(topology))
    unit = topology.round
    extra = draw(st.integers(0, 2)) if name in WITH_DEPTH else 0
    microbatches = (
        1 if name in ASYNCHRONOUS else unit * draw(st.integers(1, max(1, max_microbatches // unit)))
    )
    if name == "2bw":
        total = sum(topology.replicas) + extra + max(topology.replicas)
        microbatches = max(microbatches, -(-total // unit) * unit)
    if name in (*ASYNCHRONOUS, "data-parallel"):
        number = unit * draw(st.integers(1, max(1, max_microbatches // unit)))
    else:
        number = draw(st.integers(1, 3))
    choice = ScheduleChoice(
        name=name,
        microbatches=microbatches,
        extra_in_flight=extra,
        recompute=draw(st.sampled_from(["never", "except-last", "always"])),
    )
    return choice, topology, number
