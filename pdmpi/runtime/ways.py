"""What keeps stages from being captured by CUDA graphs, or from being compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pdmpi.config.run import RunConfig
from pdmpi.model.compiled import no_compiler_for
from pdmpi.schedule.program import ALL_STAGES, Op, Program
from pdmpi.transport.base import Transport

__all__ = ["why_no_graphs", "why_not_compiled"]


def why_no_graphs(config: RunConfig, programs: Sequence[Program], transport: Transport) -> str:
    """Return why no stage can be captured by CUDA graphs, or nothing."""
    if not config.runtime.cuda_graphs:
        return "[runtime] cuda_graphs = false"
    if config.schedule.weight_prediction:
        return "[schedule] weight_prediction makes weights as it goes"
    divided = _divided(config, programs)
    if divided:
        return divided
    groups = [group for program in programs for group in program.groups]
    summed = any(group.stage != ALL_STAGES for group in groups)  # all stages' sum is outside of graphs
    return "gradients are summed by MPI, through the host" if summed and not transport.sums_on_device else ""


def why_not_compiled(config: RunConfig, programs: Sequence[Program], device: torch.device) -> str:
    """Return why no stage can go through torch's compiler, or nothing."""
    if any(np.any(rows[:, 0] == Op.BACKWARD_INPUT) for program in programs for rows in program.rows):
        return f"schedule {config.schedule.name!r} runs its backward in two parts"
    return no_compiler_for(device) or _divided(config, programs)


def _divided(config: RunConfig, programs: Sequence[Program]) -> str:
    """Return what happens between the kernels of a stage, or nothing."""
    if config.train.batch_norm == "minibatch":
        return '[train] batch_norm = "minibatch" keeps statistics between kernels'
    if any(group.statistics for program in programs for group in program.groups):
        return '[train] batch_norm = "synchronised" sums statistics between kernels'
    return ""
