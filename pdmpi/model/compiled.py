"""A stage's calls run through torch's compiler, which makes fewer kernels of them."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from pdmpi.errors import PdmpiError
from pdmpi.model.steps import Register, Step, Steps, run_steps

__all__ = ["compiled", "no_compiler_for"]


def no_compiler_for(device: torch.device) -> str:
    """Return what torch's compiler lacks to make code for a device, or nothing."""
    if device.type == "cpu":
        name = os.environ.get("CXX", "g++")
        return "" if shutil.which(name) else f"there is no C++ compiler {name!r} (CXX names another)"
    if not find_spec("triton"):
        return "Triton is missing (pip install triton)"
    if torch.cuda.get_device_capability(device) < (7, 0):
        return "Triton makes no code for a GPU as old as this one"
    names = [os.environ.get("CC", "cc"), "gcc", "clang"]
    return "" if any(map(shutil.which, names)) else "Triton finds no C compiler (cc, gcc, clang)"


def compiled(steps: Steps) -> Steps:
    """Return the same calls with every run of them in training as one compiled call.

    Calls that draw random numbers stay as they are, since compiled ones would draw others, and so do
    recurrent layers, which the compiler does not take, and evaluation.  A call is compiled when it
    first runs, and again when shapes, types or the mode of gradients are others.
    """
    found: list[Step] = []
    for stays, grouped in itertools.groupby(steps.steps, _stays):
        run = tuple(grouped)
        found += run if stays else [_one_call(tuple(map(_inlined, run)), steps.num_registers)]
    return replace(steps, steps=tuple(found))


def _stays(step: Step) -> bool:
    parts = step.call.modules() if isinstance(step.call, nn.Module) else ()
    return step.key is not None or any(isinstance(part, nn.RNNBase) for part in parts)


def _inlined(step: Step) -> Step:
    """Return the step with a plain function, since torch 2.11 takes no method of a tensor from an object."""
    called = step.call
    if isinstance(called, nn.Module):
        return step

    def call(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    return replace(step, call=call)


def _one_call(run: tuple[Step, ...], num_registers: int) -> Step:
    """Return one step that does what some consecutive steps do."""
    reads: dict[int, None] = {}
    makes: dict[int, None] = {}
    for step in run:
        reads.update((index, None) for index in step.reads() if index not in makes)
        makes.update((index, None) for index in step.makes())
    free = {index for step in run for index in step.free}
    left = tuple(index for index in makes if index not in free)
    return Step(
        call=_compiled(_function(run, num_registers, tuple(reads), left)),
        single=None,
        args=tuple(Register(index) for index in reads),
        kwargs={},
        results=left,
        moves=(),
        clones=(),
        free=tuple(sorted(free)),
        key=None,
        dense=(),
        grad=True,
    )


def _compiled(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Return a compiled function that says on one line what cannot be compiled."""
    made = torch.compile(function, dynamic=False, fullgraph=True)

    def call(*values: Any) -> tuple[Tensor, ...]:
        try:
            return made(*values)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise PdmpiError(f"[runtime] compile: {_reason(error)}; set it to false") from error

    return call


def _reason(error: Exception) -> str:
    """Return what the compiler says, without its advice, on one line."""
    lines = [line.strip() for line in str(getattr(error, "inner_exception", error)).splitlines()]
    said = [line for line in lines if line][:1]
    mark = "Developer debug context: "
    said += [line.removeprefix(mark) for line in lines if line.startswith(mark)]
    return ": ".join(said)


def _function(
    run: tuple[Step, ...], num_registers: int, reads: tuple[int, ...], left: tuple[int, ...]
) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function from what the steps read to what they leave.

    Its code is an object of its own: the compiler compiles one so many times at most.
    """

    def call(*values: Any) -> tuple[Tensor, ...]:
        registers: list[Any] = [None] * num_registers
        for index, value in zip(reads, values, strict=True):
            registers[index] = value
        run_steps(run, registers)
        return tuple(registers[index] for index in left)

    call.__code__ = call.__code__.replace(co_name=f"steps_to_{'_'.join(map(str, left))}")
    return call
