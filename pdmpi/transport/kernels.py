"""Kernels of our own for a GPU, compiled where they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
from cupy.cuda.compiler import CompileException, compile_using_nvrtc
from cupy.cuda.function import Module
from numpy.typing import NDArray

from pdmpi.errors import PdmpiError

__all__ = ["Kernels"]


class Kernels:
    """Functions of one piece of CUDA source.

    Parameters
    ----------
    source
        CUDA C++, each function ``extern "C"``, with one structure by value as its argument.
    names
        Of the functions.
    options
        Of the compiler.

    Raises
    ------
    PdmpiError
        If this machine cannot compile them.
    """

    def __init__(self, source: str, names: Sequence[str], options: Sequence[str] = ()) -> None:
        try:
            module = Module()
            # not `cupy.RawModule`, which rounds subnormal numbers to zero whatever the options
            module.load(compile_using_nvrtc(source, tuple(options))[0])
            self._functions = {name: module.get_function(name) for name in names}
        except (CompileException, RuntimeError, OSError) as error:
            raise PdmpiError(f"CuPy compiles no kernels here: {str(error).strip().splitlines()[0]}") from None

    def launch(self, name: str, blocks: int, threads: int, argument: NDArray[Any], stream: int) -> None:
        """Launch a function on a stream.

        Parameters
        ----------
        name
            Of the function.
        blocks, threads
            Of the grid, and of a block.
        argument
            One element of the structure's type; at most 4 KiB.
        stream
            Pointer of the stream.
        """
        assert argument.shape == (1,)
        with cupy.cuda.ExternalStream(stream):
            self._functions[name]((blocks,), (threads,), (argument,))
