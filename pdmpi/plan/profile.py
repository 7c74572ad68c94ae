"""A profile: the layer graph with what each layer costs on one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pdmpi.errors import InputError
from pdmpi.graph import LayerGraph

__all__ = ["CUDA_GRAPHS", "LayerCost", "Profile"]

CUDA_GRAPHS = "cuda_graphs"
"""Fact of a profile made on a GPU: ``"yes"`` where all of it was measured in CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer costs for one microbatch on one device.

    Attributes
    ----------
    forward_s, backward_s
        Seconds, medians.
    output_bytes
        Bytes of all its outputs together: what a cut behind it would move.
    parameter_bytes, buffer_bytes
        Bytes of the parameters and buffers that it owns; of an input, what a batch takes that arrives.
    saved_bytes
        Bytes that autograd keeps from its forward to its backward.
    workspace_bytes
        Most bytes beyond all of these while it runs: what it allocates, and gradients that wait (an
        upper bound: those that come from another stage lie in a slot).
    forward_workspace_bytes
        Most bytes that there are while its forward runs, beyond what autograd saves of it and of the layers
        before: what it allocates, and values that it or later layers still read (an upper bound: some may
        lie in another stage).
    split_bytes
        Bytes that a backward in two parts keeps of it between them, beside what is saved: the gradients
        that those of its parameters are computed from.
    """

    forward_s: float
    backward_s: float
    output_bytes: int
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    forward_workspace_bytes: int = 0
    split_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured costs of every layer of a graph, and where they were measured.

    Attributes
    ----------
    graph
        The layer graph.
    costs
        One entry for each layer, in the order of ``graph.layers``.
    microbatch_size
        Rows of the batch that was measured.
    optimizer_state_factor
        Bytes of optimizer state for each byte of parameters (0 SGD, 1 momentum, 2 Adam).
    update_s_per_byte
        Seconds that one optimizer step takes for each byte of parameters.
    accumulate_s_per_byte
        Seconds that a backward takes longer, for each byte of parameters, where it adds to the
        gradients of other microbatches.
    library_bytes
        Bytes that libraries keep for themselves on a device, once they have run (cuBLAS).
    machine
        Facts of the machine, as text: host, device, library versions.
    """

    graph: LayerGraph
    costs: tuple[LayerCost, ...]
    microbatch_size: int
    optimizer_state_factor: float = 0.0
    update_s_per_byte: float = 0.0
    accumulate_s_per_byte: float = 0.0
    library_bytes: int = 0
    machine: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_graphed(self) -> bool:
        """Whether it was made in CUDA graphs, as training then is."""
        return self.machine.get(CUDA_GRAPHS) == "yes"

    def graph_bytes(self, layers: Iterable[int]) -> int:
        """Return what the graph of a stage's forward holds beyond what autograd saves, for each saved slot.

        A graph allocates in a pool of its slot, which stays as large as it was when the most was there:
        what autograd saves until then, and what a layer needs for a moment.
        """
        most = total = 0
        for i in sorted(layers) if self.is_graphed else ():
            total += self.costs[i].saved_bytes
            most = max(most, total + self.costs[i].forward_workspace_bytes)
        return max(most - total, 0)

    def accumulation_s_per_byte(self, microbatches: float) -> float:
        """Return what a backward takes longer for each byte of parameters, given those of an update."""
        return self.accumulate_s_per_byte if microbatches > 1 else 0.0

    def __post_init__(self) -> None:
        if len(self.costs) != len(self.graph.layers):
            raise InputError(
                f"profile holds {len(self.costs)} costs for {len(self.graph.layers)} layers; make it again"
            )
