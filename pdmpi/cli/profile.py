"""``pdmpi profile``: measure every layer of a model."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import RenderableType

from pdmpi.cli.output import Progress, emit, json_option, table
from pdmpi.config.load import load_config
from pdmpi.errors import InputError
from pdmpi.plan.profile import Profile
from pdmpi.plan.store import save_profile
from pdmpi.plan.units import human_bytes, human_seconds

__all__ = ["command"]


@click.command(name="profile", short_help="Measure every layer of a model.")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="File to write (HDF5).")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, or auto.")
@click.option(
    "--repeats", default=20, show_default=True, type=click.IntRange(min=3), help="Timed repetitions."
)
@click.option(
    "--budget", "budget_s", default=20.0, show_default=True, help="Seconds after which fewer repetitions do."
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
@json_option
def command(
    config: Path, output: Path, device: str, repeats: int, budget_s: float, force: bool, as_json: bool
) -> None:
    """Build the model that CONFIG names, time each layer, and write a profile.

    Each layer's forward and backward are timed on the first microbatch of the training
    set: medians after a warm-up.  Only as much of the model as fits is in memory at once.

    \b
    Examples:
      pdmpi profile configs/digits.toml -o profile.h5
      pdmpi profile configs/gpt2.toml -o gpt2.h5 --device cuda
      pdmpi profile configs/digits.toml -o profile.h5 --force --json
    """
    run = load_config(config)
    if output.exists() and not force:
        raise InputError(f"{str(output)!r} exists; pass --force to overwrite it")
    import torch

    from pdmpi.model.heap import keep_freed_memory
    from pdmpi.model.no_compiler import without_compiler
    from pdmpi.runtime.profiling import profile_run

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"--device = {device!r} is no device of torch; try cpu or cuda") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--device = {device!r}, but torch sees no CUDA device; try --device cpu")
    if place.type == "cpu":
        keep_freed_memory()
    with without_compiler(), Progress("profile") as progress:
        profile = profile_run(
            run,
            device=place,
            repeats=repeats,
            budget_s=budget_s,
            tell=lambda done, total, name: progress.update(done, name, total),
            note=lambda remark: click.echo(f"note: {remark}", err=True),
        )
    save_profile(profile, output, force)
    emit(_summary(profile, output), _table(profile, output), as_json)


def _summary(profile: Profile, output: Path) -> dict[str, object]:
    layers = [
        {
            "name": layer.name,
            "kind": layer.kind,
            "forward_s": cost.forward_s,
            "backward_s": cost.backward_s,
            "output_bytes": cost.output_bytes,
            "parameter_bytes": cost.parameter_bytes,
            "buffer_bytes": cost.buffer_bytes,
            "saved_bytes": cost.saved_bytes,
            "split_bytes": cost.split_bytes,
            "workspace_bytes": cost.workspace_bytes,
        }
        for layer, cost in zip(profile.graph.layers, profile.costs, strict=True)
    ]
    return {
        "output": output,
        "fingerprint": profile.graph.fingerprint,
        "microbatch_size": profile.microbatch_size,
        "forward_s": sum(cost.forward_s for cost in profile.costs),
        "backward_s": sum(cost.backward_s for cost in profile.costs),
        "parameter_bytes": sum(cost.parameter_bytes for cost in profile.costs),
        "optimizer_state_factor": profile.optimizer_state_factor,
        "update_s_per_byte": profile.update_s_per_byte,
        "accumulate_s_per_byte": profile.accumulate_s_per_byte,
        "library_bytes": profile.library_bytes,
        "machine": dict(profile.machine),
        "layers": layers,
    }


def _table(profile: Profile, output: Path) -> list[RenderableType]:
    rows = [
        (
            layer.name,
            layer.kind,
            human_seconds(cost.forward_s),
            human_seconds(cost.backward_s),
            human_bytes(cost.output_bytes),
            human_bytes(cost.parameter_bytes),
            human_bytes(cost.saved_bytes),
        )
        for layer, cost in zip(profile.graph.layers, profile.costs, strict=True)
    ]
    forward = sum(cost.forward_s for cost in profile.costs)
    backward = sum(cost.backward_s for cost in profile.costs)
    total = (
        f"{len(rows)} layers; a microbatch of {profile.microbatch_size} takes "
        f"{human_seconds(forward)} forward, {human_seconds(backward)} backward; written to {output}"
    )
    columns = ("layer", "kind", "forward", "backward", "output", "parameters", "saved")
    return [table(f"Profile of {output.name}", columns, rows), total]
