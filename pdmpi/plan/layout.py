"""How profiles, clusters and plans are laid out as arrays, and back with every value checked.

Ragged lists (a layer's inputs, a stage's layers) are stored as one flat array and one of
offsets, as in a compressed sparse row matrix.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pdmpi.errors import InputError
from pdmpi.graph import Layer, LayerGraph, Ref, TensorSpec
from pdmpi.graph.graph import DTYPE_BYTES
from pdmpi.plan.cluster import Cluster, Device, Level
from pdmpi.plan.depth import in_flight_depth
from pdmpi.plan.hdf5 import Arrays, texts, texts_array
from pdmpi.plan.plan import Placement, Plan, Prediction, ScheduleChoice, StagePlan
from pdmpi.plan.profile import LayerCost, Profile

__all__ = [
    "PLAN_DATASETS", "PROFILE_DATASETS", "cluster_arrays", "content_hash", "guarded", "plan_arrays",
    "plan_from", "profile_arrays", "profile_from",
]  # fmt: skip

T = TypeVar("T")
_COST_TIMES = ("forward_s", "backward_s")
_COST_BYTES = (
    "output_bytes", "parameter_bytes", "buffer_bytes", "saved_bytes", "workspace_bytes",
    "forward_workspace_bytes", "split_bytes",
)  # fmt: skip
_PLACEMENT = ("stage", "replica", "rank", "node", "device")
MAX_EXTENT = 1 << 48
"""Largest extent or byte count that is believed."""

PROFILE_DATASETS: Mapping[str, tuple[str, int]] = {
    "graph/names": ("S", 1), "graph/kinds": ("S", 1), "graph/trainable": ("b", 1),
    "graph/input_offsets": ("i", 1), "graph/inputs": ("i", 2),
    "graph/output_offsets": ("i", 1), "graph/output_dtypes": ("S", 1), "graph/output_needs_grad": ("b", 1),
    "graph/shape_offsets": ("i", 1), "graph/shapes": ("i", 1),
    "graph/parameter_offsets": ("i", 1), "graph/parameters": ("S", 1),
    "graph/returned": ("i", 2), "graph/tie_offsets": ("i", 1), "graph/ties": ("S", 1),
    "costs/times_s": ("f", 2), "costs/bytes": ("i", 2), "microbatch_size": ("i", 0),
    "optimizer_state_factor": ("f", 0), "update_s_per_byte": ("f", 0), "accumulate_s_per_byte": ("f", 0),
    "library_bytes": ("i", 0),
    "machine/keys": ("S", 1), "machine/values": ("S", 1),
}  # fmt: skip
"""Datasets of a profile: kind and number of dimensions."""

_CLUSTER_DATASETS: Mapping[str, tuple[str, int]] = {
    "name": ("S", 1), "level_names": ("S", 1), "level_counts": ("i", 1), "level_rates": ("f", 2),
    "level_shared": ("b", 1), "device_names": ("S", 1), "device_memory_bytes": ("i", 1),
    "device_relative_speed": ("f", 1), "devices_per_node": ("i", 0),
}  # fmt: skip

PLAN_DATASETS: Mapping[str, tuple[str, int]] = {
    **{f"profile/{name}": kind for name, kind in PROFILE_DATASETS.items()},
    **{f"cluster/{name}": kind for name, kind in _CLUSTER_DATASETS.items()},
    "stages/layer_offsets": ("i", 1), "stages/layers": ("i", 1), "stages/layer_names": ("S", 1),
    "stages/replicas": ("i", 1), "stages/recompute": ("b", 1), "stages/in_flight_depth": ("i", 1),
    "boundaries/pairs": ("i", 2), "boundaries/offsets": ("i", 1), "boundaries/tensors": ("S", 1),
    "placement": ("i", 2),
    "schedule/name": ("S", 1), "schedule/microbatches": ("i", 0), "schedule/extra_in_flight": ("i", 0),
    "schedule/recompute": ("S", 1),
    "prediction/period_s": ("f", 0), "prediction/samples_per_s": ("f", 0), "prediction/utilisation": ("f", 1),
    "prediction/memory_bytes": ("i", 1), "prediction/link_bytes": ("f", 1),
    "alternatives/names": ("S", 1), "alternatives/samples_per_s": ("f", 1),
    "versions/names": ("S", 1), "versions/values": ("S", 1),
    "hashes/names": ("S", 1), "hashes/sha256": ("S", 1),
}  # fmt: skip
"""Datasets of a plan: kind and number of dimensions."""


def guarded(build: Callable[[Arrays], T], arrays: Arrays, source: str) -> T:
    """Build from arrays, turning whatever a malformed array causes into an `InputError`."""
    try:
        return build(arrays)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise InputError(f"{source} holds inconsistent arrays: {error}; make it again") from None


def content_hash(arrays: Arrays) -> str:
    """SHA-256 over the names, types, shapes and bytes of arrays."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _ragged(rows: Iterable[Sequence[Any]]) -> tuple[NDArray[np.int64], list[Any]]:
    offsets: list[int] = [0]
    flat: list[Any] = []
    for row in rows:
        flat.extend(row)
        offsets.append(len(flat))
    return np.array(offsets, dtype=np.int64), flat


def _rows(offsets: NDArray[Any], flat: Sequence[T], count: int, what: str) -> list[Sequence[T]]:
    ends = offsets.tolist()
    if len(ends) != count + 1 or ends[0] != 0 or ends[-1] != len(flat) or any(np.diff(offsets) < 0):
        raise ValueError(f"offsets of {what} do not fit")
    return [flat[a:b] for a, b in itertools.pairwise(ends)]


def _ints(values: Sequence[Any], columns: int | None = None) -> NDArray[np.int64]:
    array = np.array(values, dtype=np.int64)
    return array if columns is None else array.reshape(-1, columns)


def _number(value: Any, what: str, *, least: float = 0.0, integer: bool = False) -> Any:
    number = value.item() if isinstance(value, np.generic | np.ndarray) else value
    if not math.isfinite(number) or number < least or number > MAX_EXTENT:
        raise ValueError(f"{what} is {number}, expected a finite number of at least {least:g}")
    return int(number) if integer else float(number)


def _mapping(names: NDArray[Any], values: Sequence[T]) -> dict[str, T]:
    keys = texts(names)
    if len(keys) != len(values):
        raise ValueError(f"{len(keys)} names for {len(values)} values")
    return dict(zip(keys, values, strict=True))


def _one(array: NDArray[Any]) -> str:
    (value,) = texts(array)
    return value


def _sub(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def profile_arrays(profile: Profile) -> dict[str, NDArray[Any]]:
    """Return a profile as arrays."""
    graph = profile.graph
    index = graph.index
    inputs = _ragged([(index[r.layer], r.output) for r in layer.inputs] for layer in graph.layers)
    outputs = _ragged(layer.outputs for layer in graph.layers)
    shapes = _ragged(spec.shape for spec in outputs[1])
    parameters = _ragged(layer.parameters for layer in graph.layers)
    ties = _ragged(graph.ties)
    machine = sorted(profile.machine.items())
    return {
        "graph/names": texts_array([layer.name for layer in graph.layers]),
        "graph/kinds": texts_array([layer.kind for layer in graph.layers]),
        "graph/trainable": np.array([layer.trainable for layer in graph.layers], dtype=bool),
        "graph/input_offsets": inputs[0],
        "graph/inputs": _ints(inputs[1], 2),
        "graph/output_offsets": outputs[0],
        "graph/output_dtypes": texts_array([spec.dtype for spec in outputs[1]]),
        "graph/output_needs_grad": np.array([spec.requires_grad for spec in outputs[1]], dtype=bool),
        "graph/shape_offsets": shapes[0],
        "graph/shapes": _ints(shapes[1]),
        "graph/parameter_offsets": parameters[0],
        "graph/parameters": texts_array(parameters[1]),
        "graph/returned": _ints([(index[r.layer], r.output) for r in graph.outputs], 2),
        "graph/tie_offsets": ties[0],
        "graph/ties": texts_array(ties[1]),
        "costs/times_s": np.array(
            [[getattr(c, name) for name in _COST_TIMES] for c in profile.costs], dtype=np.float64
        ).reshape(-1, len(_COST_TIMES)),
        "costs/bytes": _ints(
            [[getattr(c, name) for name in _COST_BYTES] for c in profile.costs], len(_COST_BYTES)
        ),
        "microbatch_size": np.array(profile.microbatch_size, dtype=np.int64),
        "optimizer_state_factor": np.array(profile.optimizer_state_factor, dtype=np.float64),
        "update_s_per_byte": np.array(profile.update_s_per_byte, dtype=np.float64),
        "accumulate_s_per_byte": np.array(profile.accumulate_s_per_byte, dtype=np.float64),
        "library_bytes": np.array(profile.library_bytes, dtype=np.int64),
        "machine/keys": texts_array([key for key, _ in machine]),
        "machine/values": texts_array([value for _, value in machine]),
    }


def _graph_from(arrays: Arrays) -> LayerGraph:
    names, kinds = texts(arrays["graph/names"]), texts(arrays["graph/kinds"])
    count = len(names)
    trainable = arrays["graph/trainable"].tolist()
    if not len(kinds) == len(trainable) == count:
        raise ValueError(f"{len(kinds)} kinds and {len(trainable)} flags for {count} layers")
    refs = [_ref(names, row) for row in arrays["graph/inputs"].tolist()]
    inputs = _rows(arrays["graph/input_offsets"], refs, count, "inputs")
    dtypes = texts(arrays["graph/output_dtypes"])
    unknown = set(dtypes) - set(DTYPE_BYTES)
    if unknown:
        raise ValueError(f"unknown dtype {sorted(unknown)[0]!r}")
    extents = arrays["graph/shapes"].tolist()
    if extents and not 0 <= min(extents) <= max(extents) <= MAX_EXTENT:
        raise ValueError("a tensor's extent is negative or absurd")
    shapes = _rows(arrays["graph/shape_offsets"], extents, len(dtypes), "shapes")
    needs_grad = arrays["graph/output_needs_grad"].tolist()
    specs = [
        TensorSpec(shape=tuple(shape), dtype=dtype, requires_grad=grad)
        for shape, dtype, grad in zip(shapes, dtypes, needs_grad, strict=True)
    ]
    if any(spec.nbytes > MAX_EXTENT for spec in specs):
        raise ValueError("a tensor's size is absurd")
    outputs = _rows(arrays["graph/output_offsets"], specs, count, "outputs")
    parameters = _rows(
        arrays["graph/parameter_offsets"], texts(arrays["graph/parameters"]), count, "parameters"
    )
    layers = tuple(
        Layer(
            name=names[i], kind=kinds[i], inputs=tuple(inputs[i]), outputs=tuple(outputs[i]),
            parameters=tuple(parameters[i]), trainable=trainable[i],
        )
        for i in range(count)
    )  # fmt: skip
    returned = tuple(_ref(names, row) for row in arrays["graph/returned"].tolist())
    offsets = arrays["graph/tie_offsets"]
    ties = _rows(offsets, texts(arrays["graph/ties"]), len(offsets) - 1, "ties")
    return LayerGraph(layers, returned, tuple(tuple(group) for group in ties))


def _ref(names: Sequence[str], row: Sequence[int]) -> Ref:
    layer, output = row
    if not 0 <= layer < len(names) or output < 0:
        raise ValueError(f"value {layer}:{output} is of no layer")
    return Ref(names[layer], output)


def profile_from(arrays: Arrays) -> Profile:
    """Return the profile that arrays hold."""
    graph = _graph_from(arrays)
    times, sizes = arrays["costs/times_s"], arrays["costs/bytes"]
    if times.shape != (len(graph), len(_COST_TIMES)) or sizes.shape != (len(graph), len(_COST_BYTES)):
        raise ValueError(f"costs have shapes {times.shape} and {sizes.shape} for {len(graph)} layers")
    for layer, time, size in zip(graph.layers, times.tolist(), sizes.tolist(), strict=True):
        for name, value in zip((*_COST_TIMES, *_COST_BYTES), (*time, *size), strict=True):
            _number(value, f"{name} of layer {layer.name!r}")
    costs = tuple(
        LayerCost(**dict(zip(_COST_TIMES, t, strict=True)), **dict(zip(_COST_BYTES, b, strict=True)))
        for t, b in zip(times.tolist(), sizes.tolist(), strict=True)
    )
    return Profile(
        graph=graph,
        costs=costs,
        microbatch_size=_number(arrays["microbatch_size"], "microbatch_size", least=1, integer=True),
        optimizer_state_factor=_number(arrays["optimizer_state_factor"], "optimizer_state_factor"),
        update_s_per_byte=_number(arrays["update_s_per_byte"], "update_s_per_byte"),
        accumulate_s_per_byte=_number(arrays["accumulate_s_per_byte"], "accumulate_s_per_byte"),
        library_bytes=_number(arrays["library_bytes"], "library_bytes", integer=True),
        machine=_mapping(arrays["machine/keys"], texts(arrays["machine/values"])),
    )


def cluster_arrays(cluster: Cluster) -> dict[str, NDArray[Any]]:
    """Return a cluster as arrays."""
    return {
        "name": texts_array([cluster.name]),
        "level_names": texts_array([level.name for level in cluster.levels]),
        "level_counts": _ints([level.count for level in cluster.levels]),
        "level_rates": np.array(
            [
                [
                    level.bandwidth_bytes_per_s,
                    level.latency_s,
                    level.allreduce_efficiency,
                    level.allreduce_work_s_per_byte,
                ]
                for level in cluster.levels
            ],
            dtype=np.float64,
        ).reshape(-1, 4),
        "level_shared": np.array([level.shared for level in cluster.levels], dtype=bool),
        "device_names": texts_array([device.name for device in cluster.devices]),
        "device_memory_bytes": _ints([device.memory_bytes for device in cluster.devices]),
        "device_relative_speed": np.array([d.relative_speed for d in cluster.devices], dtype=np.float64),
        "devices_per_node": np.array(cluster.devices_per_node, dtype=np.int64),
    }


def _cluster_from(arrays: Arrays) -> Cluster:
    levels = tuple(
        Level(
            name=name, count=_number(count, "a level's count", least=1, integer=True), shared=shared,
            bandwidth_bytes_per_s=_number(rates[0], "a bandwidth", least=1e-9),
            latency_s=_number(rates[1], "a latency"),
            allreduce_efficiency=_number(rates[2], "an allreduce's efficiency", least=1e-9),
            allreduce_work_s_per_byte=_number(rates[3], "an allreduce's work"),
        )
        for name, count, rates, shared in zip(
            texts(arrays["level_names"]), arrays["level_counts"].tolist(), arrays["level_rates"].tolist(),
            arrays["level_shared"].tolist(), strict=True,
        )
    )  # fmt: skip
    devices = tuple(
        Device(
            name=name, memory_bytes=_number(memory, "a device's memory", integer=True),
            relative_speed=_number(speed, "a device's speed", least=1e-9),
        )
        for name, memory, speed in zip(
            texts(arrays["device_names"]), arrays["device_memory_bytes"].tolist(),
            arrays["device_relative_speed"].tolist(), strict=True,
        )
    )  # fmt: skip
    cluster = Cluster(
        name=_one(arrays["name"]), levels=levels, devices=devices,
        devices_per_node=_number(arrays["devices_per_node"], "devices_per_node", least=1, integer=True),
    )  # fmt: skip
    if not levels or len(devices) not in (1, cluster.num_devices):
        raise ValueError(f"{len(devices)} devices described for {cluster.num_devices}")
    return cluster


def plan_arrays(plan: Plan) -> dict[str, NDArray[Any]]:
    """Return a plan as arrays, with what follows from it (boundaries, depths, hashes) beside."""
    profile, cluster = profile_arrays(plan.profile), cluster_arrays(plan.cluster)
    index = plan.profile.graph.index
    layers = _ragged([index[name] for name in stage.layers] for stage in plan.stages)
    boundaries = sorted(plan.boundaries.items())
    tensors = _ragged([str(ref) for ref in refs] for _, refs in boundaries)
    replicas = [stage.replicas for stage in plan.stages]
    alternatives, versions = sorted(plan.alternatives.items()), sorted(plan.versions.items())
    prediction = plan.prediction
    hashes = {
        "cluster": content_hash(cluster),
        "model": plan.profile.graph.fingerprint,
        "profile": content_hash(profile),
    }
    return {
        **{f"profile/{name}": array for name, array in profile.items()},
        **{f"cluster/{name}": array for name, array in cluster.items()},
        "stages/layer_offsets": layers[0],
        "stages/layers": _ints(layers[1]),
        "stages/layer_names": texts_array([name for stage in plan.stages for name in stage.layers]),
        "stages/replicas": _ints(replicas),
        "stages/recompute": np.array([stage.recompute for stage in plan.stages], dtype=bool),
        "stages/in_flight_depth": _ints(in_flight_depth(replicas, plan.schedule.extra_in_flight)),
        "boundaries/pairs": _ints([pair for pair, _ in boundaries], 2),
        "boundaries/offsets": tensors[0],
        "boundaries/tensors": texts_array(tensors[1]),
        "placement": _ints([[getattr(p, name) for name in _PLACEMENT] for p in plan.placement], 5),
        "schedule/name": texts_array([plan.schedule.name]),
        "schedule/microbatches": np.array(plan.schedule.microbatches, dtype=np.int64),
        "schedule/extra_in_flight": np.array(plan.schedule.extra_in_flight, dtype=np.int64),
        "schedule/recompute": texts_array([plan.schedule.recompute]),
        "prediction/period_s": np.array(prediction.period_s, dtype=np.float64),
        "prediction/samples_per_s": np.array(prediction.samples_per_s, dtype=np.float64),
        "prediction/utilisation": np.array(prediction.utilisation, dtype=np.float64),
        "prediction/memory_bytes": _ints(prediction.memory_bytes),
        "prediction/link_bytes": np.array(prediction.link_bytes, dtype=np.float64),
        "alternatives/names": texts_array([name for name, _ in alternatives]),
        "alternatives/samples_per_s": np.array([value for _, value in alternatives], dtype=np.float64),
        "versions/names": texts_array([name for name, _ in versions]),
        "versions/values": texts_array([value for _, value in versions]),
        "hashes/names": texts_array(sorted(hashes)),
        "hashes/sha256": texts_array([hashes[name] for name in sorted(hashes)]),
    }


def plan_from(arrays: Arrays) -> Plan:
    """Return the plan that arrays hold, after checking that its parts agree."""
    profile = profile_from(_sub(arrays, "profile/"))
    cluster = _cluster_from(_sub(arrays, "cluster/"))
    names = [layer.name for layer in profile.graph.layers]
    positions = arrays["stages/layers"].tolist()
    if sorted(positions) != list(range(len(names))):
        raise ValueError("the stages do not hold every layer exactly once")
    replicas, recompute = arrays["stages/replicas"].tolist(), arrays["stages/recompute"].tolist()
    rows = _rows(arrays["stages/layer_offsets"], [names[i] for i in positions], len(replicas), "stages")
    stages = tuple(
        StagePlan(layers=tuple(row), replicas=_number(r, "replicas", least=1, integer=True), recompute=again)
        for row, r, again in zip(rows, replicas, recompute, strict=True)
    )
    placement = tuple(
        Placement(**dict(zip(_PLACEMENT, row, strict=True))) for row in arrays["placement"].tolist()
    )
    if [(p.stage, p.replica) for p in placement] != [
        (s, r) for s, n in enumerate(replicas) for r in range(n)
    ]:
        raise ValueError("the placement does not list every replica of every stage in order")
    if any(min(p.rank, p.node, p.device) < 0 or p.rank >= len(placement) for p in placement):
        raise ValueError("the placement has a rank, node or device out of range")
    prediction = Prediction(
        period_s=_number(arrays["prediction/period_s"], "period_s"),
        samples_per_s=_number(arrays["prediction/samples_per_s"], "samples_per_s"),
        utilisation=tuple(arrays["prediction/utilisation"].tolist()),
        memory_bytes=tuple(arrays["prediction/memory_bytes"].tolist()),
        link_bytes=tuple(arrays["prediction/link_bytes"].tolist()),
    )
    plan = Plan(
        profile=profile,
        cluster=cluster,
        schedule=ScheduleChoice(
            name=_one(arrays["schedule/name"]),
            microbatches=_number(arrays["schedule/microbatches"], "microbatches", least=1, integer=True),
            extra_in_flight=_number(arrays["schedule/extra_in_flight"], "extra_in_flight", integer=True),
            recompute=_one(arrays["schedule/recompute"]),
        ),
        stages=stages,
        placement=placement,
        prediction=prediction,
        alternatives=_mapping(arrays["alternatives/names"], arrays["alternatives/samples_per_s"].tolist()),
        versions=_mapping(arrays["versions/names"], texts(arrays["versions/values"])),
    )
    again = plan_arrays(plan)
    for name in ("hashes/sha256", "stages/in_flight_depth", "boundaries/pairs", "boundaries/tensors"):
        if not np.array_equal(again[name], arrays[name]):
            raise ValueError(f"{name} does not follow from the rest")
    return plan
