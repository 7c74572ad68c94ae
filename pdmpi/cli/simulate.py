"""``pdmpi simulate``: predict what a plan gives, draw its pipeline, export its timeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
from rich.table import Table

from pdmpi.cli.output import emit, json_option, table
from pdmpi.errors import InputError
from pdmpi.plan.plan import Plan
from pdmpi.plan.store import load_plan
from pdmpi.plan.units import human_bytes, human_seconds
from pdmpi.schedule.registry import SCHEDULES
from pdmpi.schedule.topology import topology_of
from pdmpi.simulate.auto_depth import auto_depth
from pdmpi.simulate.forecast import Forecast, adapted, forecast
from pdmpi.simulate.trace import write_trace

__all__ = ["command"]

_PICTURES = (".png", ".svg", ".pdf")


@click.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--minibatches", type=click.IntRange(1),
              help="Minibatches to simulate [default: as many as reach the steady state].")  # fmt: skip
@click.option("--schedule", help=f"Another schedule than the plan's, of {', '.join(SCHEDULES)}.")
@click.option(
    "--microbatches", type=click.IntRange(1), help="Microbatches of a minibatch [default: the plan's]."
)
@click.option("--extra-in-flight", metavar="N|auto",
              help="Minibatches in flight beyond the depth; auto: as few as hide the transfers.")  # fmt: skip
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the pipeline (.png, .svg, .pdf).")
@click.option(
    "--trace", type=click.Path(path_type=Path), help="Write a trace that ui.perfetto.dev opens (.json)."
)
@json_option
def command(
    plan: Path, minibatches: int | None, schedule: str | None, microbatches: int | None,
    extra_in_flight: str | None, plot: Path | None, trace: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Predict throughput, utilisation and memory of a plan; draw its pipeline.

    The plan's program is simulated instruction by instruction, with the profile's times and the
    cluster's links.

    \b
    Examples:
      pdmpi simulate plan.h5
      pdmpi simulate plan.h5 --plot pipeline.png --trace trace.json
      pdmpi simulate plan.h5 --extra-in-flight auto
      pdmpi simulate plan.h5 --schedule 1f1b --microbatches 8 --minibatches 3 --plot 1f1b.png
    """
    if plot is not None and plot.suffix not in _PICTURES:
        raise InputError(f"--plot {plot}: end it in one of {', '.join(_PICTURES)}")
    problems = [
        f"{name} {path}: no directory {path.parent}"
        for name, path in (("--plot", plot), ("--trace", trace))
        if path is not None and not path.parent.is_dir()
    ]
    InputError.collect(problems)
    loaded = load_plan(plan)
    extra = _extra(extra_in_flight)
    choice = adapted(loaded.schedule, topology_of(loaded), schedule, microbatches, extra)
    chosen = replace(loaded, schedule=choice)
    if extra_in_flight == "auto":
        depth = auto_depth(chosen)
        chosen = replace(chosen, schedule=replace(choice, extra_in_flight=depth.extra_in_flight))
    found = forecast(chosen, minibatches or 0)
    if plot is not None:
        from pdmpi.simulate.draw import draw  # matplotlib takes a second to import

        draw(found.timeline, plot)
    if trace is not None:
        write_trace(found.timeline, trace)
    emit(_data(chosen, found, plot, trace), _tables(chosen, found), as_json)


def _extra(text: str | None) -> int | None:
    """Read ``--extra-in-flight``; ``None`` keeps the plan's."""
    if text is None or text == "auto":
        return None
    if not text.isdecimal():
        raise InputError(f"--extra-in-flight {text!r} is neither a number nor auto")
    return int(text)


def _data(plan: Plan, found: Forecast, plot: Path | None, trace: Path | None) -> dict[str, object]:
    report = found.report
    return {
        "schedule": plan.schedule,
        "num_stages": len(plan.stages),
        "num_ranks": plan.num_ranks,
        "microbatch_size": plan.profile.microbatch_size,
        "planned_samples_per_s": plan.prediction.samples_per_s,
        "report": report,
        "transfers": len(found.timeline.transfers),
        "plot": plot,
        "trace": trace,
    }


def _tables(plan: Plan, found: Forecast) -> list[Table]:
    report = found.report
    steady = report.steady_to_s > report.steady_from_s
    name = f"{found.program.schedule}, {plan.num_ranks} ranks, {report.num_microbatches} microbatches"
    rows: list[tuple[str, str]] = [
        ("throughput, steady state" if steady else "throughput", f"{report.samples_per_s:.4g} samples/s"),
        ("time between microbatches", human_seconds(report.period_s)),
        ("throughput, filling and draining counted", f"{report.overall_samples_per_s:.4g} samples/s"),
        ("duration of the program", human_seconds(report.duration_s)),
        ("minibatches in flight beyond the depth", str(plan.schedule.extra_in_flight)),
    ]
    ranks = [
        (
            rank.rank, ", ".join(map(str, rank.stages)), f"{100 * rank.utilisation:.1f} %",
            human_seconds(rank.busy_s), human_seconds(rank.idle_s), rank.in_flight,
            human_bytes(rank.memory_bytes), human_bytes(rank.memory_parts["weights"]),
            human_bytes(rank.memory_parts["saved"]),
        )
        for rank in report.ranks
    ]  # fmt: skip
    columns = (
        "rank", "stage", "utilisation", "busy", "idle", "in flight", "peak memory", "weights", "activations",
    )  # fmt: skip
    return [table(f"Predicted: {name}", ("", ""), rows), table("Ranks", columns, ranks)]
