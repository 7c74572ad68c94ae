"""The boundary of a stage: its regions, one for each channel and slot, allocated before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pdmpi.graph import Ref, TensorSpec
from pdmpi.runtime.slots import Allocate, Region
from pdmpi.schedule.program import Channel, Kind, Program

__all__ = ["Boundary", "boundary_of", "gradient_specs"]

Regions = Mapping[Channel, Sequence[Region]]


@dataclass(frozen=True)
class Boundary:
    """The regions of one stage, ``[slot]`` within each channel.

    Attributes
    ----------
    inputs, outputs
        Activations from earlier and to later stages.
    grad_inputs, grad_outputs
        Gradients from later and to earlier stages.
    """

    inputs: Regions = field(default_factory=dict)
    outputs: Regions = field(default_factory=dict)
    grad_inputs: Regions = field(default_factory=dict)
    grad_outputs: Regions = field(default_factory=dict)

    def incoming(self, channel: Channel) -> Sequence[Region]:
        """Return the regions that a channel is received into."""
        return (self.inputs if channel.kind == Kind.ACTIVATION else self.grad_inputs)[channel]

    def outgoing(self, channel: Channel) -> Sequence[Region]:
        """Return the regions that a channel is sent from."""
        return (self.outputs if channel.kind == Kind.ACTIVATION else self.grad_outputs)[channel]


def gradient_specs(specs: Mapping[Ref, TensorSpec]) -> dict[Ref, TensorSpec]:
    """Return the values of an edge whose gradients flow back over it."""
    return {ref: spec for ref, spec in specs.items() if spec.requires_grad}


def boundary_of(
    stage: int,
    programs: Iterable[Program],
    edges: Mapping[tuple[int, int], Mapping[Ref, TensorSpec]],
    allocate: Allocate,
) -> Boundary:
    """Allocate the regions of a stage, enough slots for each of the programs.

    Parameters
    ----------
    stage
        The stage.
    programs
        All that will run.
    edges
        What flows from stage to stage.
    allocate
        Makes their memory.
    """
    found: dict[str, dict[Channel, list[Region]]] = {
        "inputs": {}, "outputs": {}, "grad_inputs": {}, "grad_outputs": {}
    }  # fmt: skip
    for program in programs:
        slots = program.slots[stage]
        for channel in program.channels:
            back = channel.kind == Kind.GRADIENT
            for is_source, end in ((True, channel.source_stage), (False, channel.target_stage)):
                if end != stage:
                    continue
                side = ("grad_" if back else "") + ("outputs" if is_source else "inputs")
                count = {
                    "inputs": slots.input, "outputs": slots.output,
                    "grad_inputs": slots.grad_in, "grad_outputs": slots.grad_out,
                }[side]  # fmt: skip
                pair = (channel.target_stage, channel.source_stage)
                specs = gradient_specs(edges[pair]) if back else edges[pair[::-1]]
                regions = found[side].setdefault(channel, [])
                regions += [Region(specs, allocate) for _ in range(count - len(regions))]
    return Boundary(**found)
