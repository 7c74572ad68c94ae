"""``pdmpi check``: prove a plan's program safe before it is launched."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.table import Table

from pdmpi.cli.output import emit, json_option, table
from pdmpi.errors import InputError
from pdmpi.plan.store import load_plan
from pdmpi.schedule.check import UnsafeProgram, violations
from pdmpi.schedule.dump import dump
from pdmpi.schedule.dump import parse as parse_program
from pdmpi.schedule.program import Program
from pdmpi.schedule.registry import SCHEDULES, program_of
from pdmpi.schedule.staleness import version_lag
from pdmpi.schedule.text import grid
from pdmpi.schedule.topology import topology_of
from pdmpi.schedule.violation import Violation
from pdmpi.simulate.forecast import adapted, steady_minibatches

__all__ = ["command"]


@click.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--minibatches", type=click.IntRange(1),
              help="Minibatches of the program [default: as many as reach the steady state].")  # fmt: skip
@click.option("--schedule", help=f"Another schedule than the plan's, of {', '.join(SCHEDULES)}.")
@click.option(
    "--microbatches", type=click.IntRange(1), help="Microbatches of a minibatch [default: the plan's]."
)
@click.option("--extra-in-flight", type=click.IntRange(0), help="Minibatches in flight beyond the depth.")
@click.option("--grid", "draw", is_flag=True, help="Draw the program, one line a rank.")
@click.option("--text", type=click.Path(path_type=Path), help="Write the program's instructions as text.")
@json_option
def command(
    plan: Path, minibatches: int | None, schedule: str | None, microbatches: int | None,
    extra_in_flight: int | None, draw: bool, text: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Prove a plan's program safe.

    Each microbatch runs once forward and once backward at every stage; sends and receives
    agree; no rank waits for ever, whatever the size of messages; no slot and no weight version is
    overwritten while it is needed.  PLAN is a plan, or a program's text (``--text``).  Ends with 1
    when anything is wrong, all of it shown.

    \b
    Examples:
      pdmpi check plan.h5
      pdmpi check plan.h5 --schedule zb-h1 --microbatches 8 --minibatches 1 --grid
      pdmpi check plan.h5 --schedule 2bw --json
      pdmpi check plan.h5 --text program.txt && pdmpi check program.txt
    """
    if plan.suffix == ".txt":
        program = parse_program(_read(plan))
    else:
        loaded = load_plan(plan)
        topology = topology_of(loaded)
        choice = adapted(loaded.schedule, topology, schedule, microbatches, extra_in_flight)
        number = minibatches or steady_minibatches(choice, topology)
        program = program_of(replace(loaded, schedule=choice), number)
    if text is not None:
        text.write_text(dump(program))
    found = violations(program)
    if found:
        unsafe = UnsafeProgram(program, found)
        emit(_data(program, found), unsafe.report, as_json)
        raise unsafe
    emit(_data(program, found), [_table(program), *([grid(program)] if draw else []), "safe"], as_json)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"program {path} cannot be read: {error}") from error


def _data(program: Program, found: list[Violation]) -> dict[str, object]:
    lags = [] if found else version_lag(program)
    return {
        "schedule": program.schedule,
        "num_ranks": len(program.rows),
        "num_stages": program.topology.num_stages,
        "num_microbatches": program.num_microbatches,
        "num_instructions": sum(map(len, program.rows)),
        "safe": not found,
        "violations": [{**asdict(v), "fault": v.fault.value} for v in found],
        "stages": [
            {
                "ranks": ranks,
                "microbatches_per_update": program.microbatches_per_update[stage],
                "slots": asdict(program.slots[stage]),
            }
            for stage, ranks in enumerate(program.topology.ranks)
        ],
        "version_lag": [int(lag.max()) for lag in lags],
    }


def _table(program: Program) -> Table:
    lags = version_lag(program)
    rows = [
        (
            stage, ", ".join(map(str, ranks)), program.microbatches_per_update[stage],
            *asdict(program.slots[stage]).values(), int(lags[stage].max()),
        )
        for stage, ranks in enumerate(program.topology.ranks)
    ]  # fmt: skip
    columns = (
        "stage", "ranks", "per update", "weights", "input", "output", "saved", "grad in", "grad out", "lag",
    )  # fmt: skip
    count = sum(map(len, program.rows))
    title = f"{program.schedule}: {program.num_microbatches} microbatches, {count} instructions, slots"
    return table(title, columns, rows)
