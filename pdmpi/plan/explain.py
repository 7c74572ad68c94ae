"""What bounds a plan's period, and what would help most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pdmpi.errors import InputError
from pdmpi.graph import Layer, LayerGraph, Ref
from pdmpi.plan.cluster import Cluster
from pdmpi.plan.partition import estimate_of, partition
from pdmpi.plan.plan import Plan
from pdmpi.plan.profile import Profile

__all__ = ["Explanation", "Remedy", "explain"]

_FASTER = 10.0
_SLOWER = 1.02


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change, and the samples per second of the best plan after it."""

    change: str
    samples_per_s: float
    speed_up: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The stage and the cause that bound the period, the share of the ideal that is reached, and remedies.

    Attributes
    ----------
    stage
        The slowest stage.
    bound
        ``"compute"``, ``"synchronisation"``, ``"transfer"``, ``"in flight"`` or ``"filling"``.
    sentence
        The same in words, with numbers.
    ideal_share
        Samples per second against all devices computing all the time.
    remedies
        Best first; those that change nothing are left out.
    """

    stage: int
    bound: str
    sentence: str
    ideal_share: float
    remedies: tuple[Remedy, ...]


def explain(plan: Plan) -> Explanation:
    """Return what bounds a plan and what would help most, by planning again with one thing changed."""
    found = estimate_of(plan)
    slowest = max(range(len(found.stages)), key=lambda s: found.stages[s].period_s)
    stage = found.stages[slowest]
    planned, period = found.prediction, plan.prediction.period_s
    bound = stage.bound
    words = {
        "compute": f"computes {stage.forward_s + stage.backward_s:.4g} s a microbatch on "
        f"{plan.stages[slowest].replicas} devices",
        "synchronisation": f"sums {stage.gradient_bytes / 1e6:.4g} MB of gradients over "
        f"{plan.stages[slowest].replicas} replicas in {stage.sync_s:.4g} s",
        "transfer": f"keeps its links busy for {stage.transfer_s:.4g} s a microbatch",
    }
    sentence = f"stage {slowest} {words[bound]}"
    if found.round_trip_s > found.steady_s * (1 + 1e-9):
        bound = "in flight"
        sentence = (
            f"a round trip takes {found.round_trip_s / found.steady_s:.2f} times what the microbatches in "
            "flight cover; extra_in_flight = auto hides it where memory allows"
        )
    elif planned.period_s > found.steady_s * (1 + 1e-9):
        bound = "filling"
        share = 1 - found.steady_s / planned.period_s
        sentence = f"filling and draining take {share:.0%} of the time; more microbatches help"
    if period > planned.period_s * _SLOWER:
        sentence += (
            f"; simulated, stages wait for gradients of replicas or for links another "
            f"{1 - planned.period_s / period:.0%} of the time"
        )
    seconds = sum(cost.forward_s + cost.backward_s for cost in plan.profile.costs)
    speed = sum(plan.cluster.device(d).relative_speed for d in range(plan.cluster.num_devices))
    remedies = []
    for change, profile, cluster in _changes(plan, slowest):
        try:
            other = partition(profile, cluster, plan.schedule).prediction.samples_per_s
        except InputError:
            continue
        gain = other / planned.samples_per_s
        if gain > 1.001:
            remedies.append(Remedy(change, other, gain))
    remedies.sort(key=lambda remedy: -remedy.speed_up)
    ideal = seconds / speed / period if period else 0.0
    return Explanation(slowest, bound, sentence, ideal, tuple(remedies))


def _changes(plan: Plan, slowest: int) -> Iterator[tuple[str, Profile, Cluster]]:
    cluster, profile = plan.cluster, plan.profile
    for i, level in enumerate(cluster.levels):
        faster = replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * _FASTER)
        levels = (*cluster.levels[:i], faster, *cluster.levels[i + 1 :])
        yield f"{level.name} links {_FASTER:g} times faster", profile, replace(cluster, levels=levels)
        if level.latency_s:
            prompt = replace(level, latency_s=level.latency_s / _FASTER)
            levels = (*cluster.levels[:i], prompt, *cluster.levels[i + 1 :])
            yield f"{level.name} latency {_FASTER:g} times lower", profile, replace(cluster, levels=levels)
    if any(device.memory_bytes for device in cluster.devices):
        ample = tuple(replace(device, memory_bytes=0) for device in cluster.devices)
        yield "unlimited memory", profile, replace(cluster, devices=ample)
    index = profile.graph.index
    heaviest = max(
        plan.stages[slowest].layers,
        key=lambda name: profile.costs[index[name]].forward_s + profile.costs[index[name]].backward_s,
    )
    if len(profile.graph.layers[index[heaviest]].outputs) == 1:
        yield f"layer {heaviest!r} split in two", _split(profile, index[heaviest]), cluster


def _split(profile: Profile, position: int) -> Profile:
    """Return a profile with one layer replaced by two of half its cost, in series."""
    graph, cost = profile.graph, profile.costs[position]
    layer = graph.layers[position]
    first = Layer(
        name=f"{layer.name}.first half", kind=layer.kind, inputs=layer.inputs, outputs=layer.outputs,
        parameters=layer.parameters, trainable=layer.trainable,
    )  # fmt: skip
    second = replace(layer, inputs=(Ref(first.name),), parameters=tuple(f"{p}'" for p in layer.parameters))
    half = replace(
        cost, forward_s=cost.forward_s / 2, backward_s=cost.backward_s / 2,
        parameter_bytes=cost.parameter_bytes // 2, buffer_bytes=cost.buffer_bytes // 2,
        saved_bytes=cost.saved_bytes // 2, split_bytes=cost.split_bytes // 2,
    )  # fmt: skip
    layers = (*graph.layers[:position], first, second, *graph.layers[position + 1 :])
    costs = (*profile.costs[:position], half, half, *profile.costs[position + 1 :])
    return replace(profile, graph=LayerGraph(layers, graph.outputs), costs=costs)
