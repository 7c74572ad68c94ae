"""One pass over memory for an update in 16 bits on a GPU.

Casting the gradients to float32, scaling them, stepping the masters and rounding the new version
are four passes, which for SGD with momentum move 40 bytes a parameter; one kernel moves 20 and
keeps no copy of the gradients.  It computes in float32 what `torch.optim` does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pdmpi.errors import PdmpiError

if TYPE_CHECKING:  # importing it needs CuPy
    from pdmpi.transport.kernels import Kernels

__all__ = ["FusedStep", "fused_step"]

_MOST = 64
"""Tensors of one launch: its arguments may take 4 KiB."""
_THREADS = 256
_CHUNK = 16 * _THREADS
"""Elements of one block."""

_TABLE = np.dtype(
    [
        ("gradient", "u8", _MOST), ("master", "u8", _MOST), ("first", "u8", _MOST), ("second", "u8", _MOST),
        ("step", "u8", _MOST), ("version", "u8", _MOST), ("size", "i8", _MOST), ("block", "i4", _MOST),
        ("count", "i4"), ("knobs", "f8", 7),
    ],
    align=True,
)  # fmt: skip

_SOURCE = r"""
struct Table {
    const unsigned short* gradient[MOST];
    float* master[MOST];
    float* first[MOST];
    float* second[MOST];
    const float* step[MOST];
    unsigned short* version[MOST];
    long long size[MOST];
    int block[MOST];  // the first one of each tensor
    int count;
    double knobs[7];
};

__device__ float widened(unsigned short bits) { return __uint_as_float((unsigned int)bits << 16); }

__device__ unsigned short rounded(float value) {  // to the nearest, ties to even
    unsigned int bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    return (unsigned short)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

struct Sgd {
    float scale, lr, momentum, decay;
    bool nesterov;
    __device__ Sgd(const double* knobs, const float*)
        : scale(knobs[0]), lr(knobs[1]), momentum(knobs[2]), decay(knobs[3]), nesterov(knobs[4] != 0.0) {}
    __device__ void operator()(float gradient, float& master, float& first, float&) const {
        gradient = gradient * scale;
        if (decay != 0.0f) gradient += decay * master;
        first = momentum * first + gradient;
        master -= lr * (nesterov ? gradient + momentum * first : first);
    }
};

struct Adam {
    float scale, decay, shrinkage, beta1, rest1, beta2, rest2, epsilon, step_size, root;
    __device__ Adam(const double* knobs, const float* step)
        : scale(knobs[0]), decay(knobs[2]), shrinkage(knobs[3]), beta1(knobs[4]), rest1(1.0 - knobs[4]),
          beta2(knobs[5]), rest2(1.0 - knobs[5]), epsilon(knobs[6]),
          step_size(knobs[1] / (1.0 - pow(knobs[4], (double)*step))),
          root(sqrt(1.0 - pow(knobs[5], (double)*step))) {}
    __device__ void operator()(float gradient, float& master, float& first, float& second) const {
        gradient = gradient * scale;
        if (decay != 0.0f) gradient += decay * master;
        if (shrinkage != 0.0f) master -= shrinkage * master;
        first = beta1 * first + rest1 * gradient;
        second = beta2 * second + rest2 * gradient * gradient;
        master -= step_size * first / (sqrtf(second) / root + epsilon);
    }
};

template <typename Rule, int STATES>
__device__ void step(const Table& table) {
    int tensor = 0, end = table.count;
    while (end - tensor > 1) {
        int middle = (tensor + end) / 2;
        if (table.block[middle] <= (int)blockIdx.x) tensor = middle; else end = middle;
    }
    const unsigned short* gradient = table.gradient[tensor];
    float* master = table.master[tensor];
    float* first = table.first[tensor];
    float* second = table.second[tensor];
    unsigned short* version = table.version[tensor];
    __shared__ __align__(16) unsigned char memory[sizeof(Rule)];
    if (threadIdx.x == 0) *(Rule*)memory = Rule(table.knobs, table.step[tensor]);
    __syncthreads();
    const Rule rule = *(const Rule*)memory;
    const long long begin = (long long)(blockIdx.x - table.block[tensor]) * CHUNK;
    const long long left = table.size[tensor] - begin;
    const int size = left < CHUNK ? (int)left : CHUNK;
    const bool aligned = ((unsigned long long)gradient & 7) == 0;
    #pragma unroll
    for (int pass = 0; pass < CHUNK / (4 * THREADS); ++pass) {
        const int at = 4 * (pass * THREADS + threadIdx.x);
        const long long i = begin + at;
        if (at + 4 <= size && aligned) {
            ushort4 g = *(const ushort4*)(gradient + i), v;
            float4 m = *(float4*)(master + i), a = {0, 0, 0, 0}, b = {0, 0, 0, 0};
            if (STATES > 0) a = *(float4*)(first + i);
            if (STATES > 1) b = *(float4*)(second + i);
            rule(widened(g.x), m.x, a.x, b.x);
            rule(widened(g.y), m.y, a.y, b.y);
            rule(widened(g.z), m.z, a.z, b.z);
            rule(widened(g.w), m.w, a.w, b.w);
            v.x = rounded(m.x); v.y = rounded(m.y); v.z = rounded(m.z); v.w = rounded(m.w);
            *(float4*)(master + i) = m;
            if (STATES > 0) *(float4*)(first + i) = a;
            if (STATES > 1) *(float4*)(second + i) = b;
            *(ushort4*)(version + i) = v;
        } else {
            for (int one = at; one < at + 4 && one < size; ++one) {
                const long long j = begin + one;
                float m = master[j], a = 0, b = 0;
                if (STATES > 0) a = first[j];
                if (STATES > 1) b = second[j];
                rule(widened(gradient[j]), m, a, b);
                master[j] = m;
                if (STATES > 0) first[j] = a;
                if (STATES > 1) second[j] = b;
                version[j] = rounded(m);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) sgd0(const Table table) { step<Sgd, 0>(table); }
extern "C" __global__ void __launch_bounds__(THREADS) sgd1(const Table table) { step<Sgd, 1>(table); }
extern "C" __global__ void __launch_bounds__(THREADS) adam(const Table table) { step<Adam, 2>(table); }
"""


def fused_step(optimizer: torch.optim.Optimizer | None, parameters: Sequence[Tensor]) -> FusedStep | None:
    """Return the fused step of an optimizer, or None where there is none for it.

    There is one for SGD, Adam and AdamW, over bfloat16 parameters on a GPU, where CuPy is installed.

    Parameters
    ----------
    optimizer
        Over the float32 masters.
    parameters
        What is rounded from them, of the type and on the device of the versions.
    """
    kinds = {(p.dtype, p.device.type) for p in parameters}
    rule = _RULES.get(type(optimizer)) if optimizer is not None else None
    if kinds != {(torch.bfloat16, "cuda")} or rule is None or optimizer is None:
        return None
    if not all(rule[0](group) for group in optimizer.param_groups):
        return None
    try:
        from pdmpi.transport.kernels import Kernels

        options = (f"-DMOST={_MOST}", f"-DTHREADS={_THREADS}", f"-DCHUNK={_CHUNK}")
        kernels = Kernels(_SOURCE, ("sgd0", "sgd1", "adam"), options)
    except (ImportError, PdmpiError) as error:
        warnings.warn(f"updates in 16 bits take more than twice as long: {error}", stacklevel=2)
        return None
    return FusedStep(optimizer, rule[1], kernels)


class FusedStep:
    """Steps an optimizer's float32 masters by bfloat16 gradients and rounds a new version from them.

    Its state is the optimizer's own.  It is made here, before any activations: among those it would
    keep whole segments of the allocator from being given back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, knobs: _Knobs, kernels: Kernels) -> None:
        self._optimizer = optimizer
        self._knobs = knobs
        self._kernels = kernels
        for group in optimizer.param_groups:
            for master in group["params"]:
                _state_of(optimizer, master, knobs(group)[0])

    def __call__(
        self,
        gradients: Mapping[nn.Parameter, Tensor],
        versions: Mapping[nn.Parameter, Tensor],
        scale: float,
    ) -> None:
        """Make one step.

        Parameters
        ----------
        gradients
            bfloat16, of those masters that have one.
        versions
            Where each master is rounded to.
        scale
            Factor on the gradients.
        """
        with torch.no_grad():
            for group in self._optimizer.param_groups:
                members = [p for p in group["params"] if p in gradients]
                name, numbers = self._knobs(group)
                states = [_state_of(self._optimizer, p, name) for p in members]
                steps = [state["step"] for state in states if "step" in state]
                if steps:
                    torch._foreach_add_(steps, 1.0)
                rows = [
                    (gradients[p].contiguous(), p, versions[p], state)
                    for p, state in zip(members, states, strict=True)
                    if p.numel()
                ]
                stream = torch.cuda.current_stream().cuda_stream
                for table, blocks in _tables(rows, (scale, *numbers)):
                    self._kernels.launch(name, blocks, _THREADS, table, stream)
            left = [p for p in versions if p not in gradients]
            if left:
                torch._foreach_copy_([versions[p] for p in left], [*left])


_Knobs = Callable[[Mapping[str, Any]], tuple[str, tuple[float, ...]]]
"""From a group of parameters to the name of its kernel and the numbers that it takes after the scale."""


def _is_plain(group: Mapping[str, Any]) -> bool:
    numbers = [group["lr"], *group.get("betas", ())]
    return not (group["maximize"] or group["differentiable"] or any(isinstance(n, Tensor) for n in numbers))


def _sgd_is_plain(group: Mapping[str, Any]) -> bool:
    return _is_plain(group) and not group["dampening"]


def _adam_is_plain(group: Mapping[str, Any]) -> bool:
    return _is_plain(group) and not group["amsgrad"] and bool(group["capturable"] or group["fused"])


def _sgd_knobs(group: Mapping[str, Any]) -> tuple[str, tuple[float, ...]]:
    momentum = group["momentum"]
    return (
        "sgd1" if momentum else "sgd0",
        (group["lr"], momentum, group["weight_decay"], float(group["nesterov"])),
    )


def _adam_knobs(group: Mapping[str, Any]) -> tuple[str, tuple[float, ...]]:
    decay = group["weight_decay"]
    apart = group.get("decoupled_weight_decay", False)
    coupled, shrinkage = (0.0, group["lr"] * decay) if apart else (decay, 0.0)
    return "adam", (group["lr"], coupled, shrinkage, *group["betas"], group["eps"])


def _adamw_knobs(group: Mapping[str, Any]) -> tuple[str, tuple[float, ...]]:
    return _adam_knobs({**group, "decoupled_weight_decay": True})


_RULES: dict[type[torch.optim.Optimizer], tuple[Callable[[Mapping[str, Any]], bool], _Knobs]] = {
    torch.optim.SGD: (_sgd_is_plain, _sgd_knobs),
    torch.optim.Adam: (_adam_is_plain, _adam_knobs),
    torch.optim.AdamW: (_adam_is_plain, _adamw_knobs),
}


def _state_of(optimizer: torch.optim.Optimizer, master: nn.Parameter, name: str) -> dict[str, Any]:
    """Return a master's state, made as the optimizer would make it if there is none yet."""
    state: dict[str, Any] = optimizer.state[master]
    if name == "sgd1" and state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros_like(master)
    if name == "adam" and not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.device != master.device:  # a kernel reads it by its address
            state[key] = value.to(master.device)
    return state


_Row = tuple[Tensor, nn.Parameter, Tensor, Mapping[str, Any]]
"""Gradient, master, version and state of one parameter."""


def _tables(rows: Sequence[_Row], knobs: Sequence[float]) -> Iterator[tuple[NDArray[Any], int]]:
    """Yield the arguments of each launch and its number of blocks."""
    for begin in range(0, len(rows), _MOST):
        table, blocks = np.zeros(1, _TABLE), 0
        entry = table[0]
        for i, (gradient, master, version, state) in enumerate(rows[begin : begin + _MOST]):
            addressed = {
                "gradient": gradient, "master": master, "version": version,
                "first": state.get("momentum_buffer", state.get("exp_avg")),
                "second": state.get("exp_avg_sq"), "step": state.get("step"),
            }  # fmt: skip
            for key, tensor in addressed.items():
                entry[key][i] = 0 if tensor is None else tensor.data_ptr()
            entry["size"][i], entry["block"][i] = master.numel(), blocks
            blocks += math.ceil(master.numel() / _CHUNK)
            entry["count"] = i + 1
        entry["knobs"][: len(knobs)] = knobs
        yield table, blocks
