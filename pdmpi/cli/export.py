"""``pdmpi export``: a checkpoint as the model's own ``state_dict``."""

from __future__ import annotations

from pathlib import Path

import click

from pdmpi.checkpoint.safetensors import export
from pdmpi.cli.checkpoint_tables import find_checkpoint
from pdmpi.cli.output import emit, json_option
from pdmpi.plan.hdf5 import check_overwrite
from pdmpi.plan.units import human_bytes

__all__ = ["command"]


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="File to write.")
@click.option("--force", is_flag=True, help="Overwrite the output if it exists.")
@json_option
def command(checkpoint: Path, output: Path, force: bool, as_json: bool) -> None:
    """Write the parameters and buffers of CHECKPOINT as a safetensors file.

    CHECKPOINT is the directory of one checkpoint, or a run's directory, whose newest good
    checkpoint is taken.  The names in the file are those of the model's own state_dict:

    \b
        state = safetensors.torch.load_file("model.safetensors")
        model.load_state_dict(state)

    \b
    Examples:
      pdmpi export runs -o model.safetensors
      pdmpi export runs/checkpoints/step-000000001200 -o model.safetensors
      pdmpi train configs/digits.toml --plan plan.h5 --init model.safetensors
    """
    check_overwrite(output, force)
    found = find_checkpoint(checkpoint)
    tensors = export(found, output)
    data = {
        "checkpoint": found.directory,
        "minibatch": found.manifest.minibatch,
        "output": output,
        "tensors": tensors,
        "output_bytes": output.stat().st_size,
    }
    size = human_bytes(output.stat().st_size)
    text = f"{output}: {tensors} tensors, {size}, of minibatch {found.manifest.minibatch}"
    emit(data, text, as_json)
