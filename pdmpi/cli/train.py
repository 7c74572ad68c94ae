"""``pdmpi train``: train a model as a plan says, one MPI rank a replica of a stage."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from pdmpi.checkpoint.lock import RunLock
from pdmpi.cli.output import Progress, emit, json_option, table
from pdmpi.config.load import load_config
from pdmpi.config.run import RunConfig
from pdmpi.errors import InputError
from pdmpi.plan.plan import Plan
from pdmpi.plan.store import load_plan, plan_from_bytes, plan_to_bytes
from pdmpi.plan.units import human_seconds
from pdmpi.runtime.evaluation import Score
from pdmpi.runtime.report import MetricsFile, SegmentReport, StageLag
from pdmpi.schedule.check import CheckedProgram
from pdmpi.simulate.costs import costs_of
from pdmpi.simulate.engine import simulate
from pdmpi.slurm.commands import end_time
from pdmpi.slurm.environment import JobEnvironment
from pdmpi.slurm.signals import StopRequest

__all__ = ["command"]


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--plan", "plan_path", required=True, type=click.Path(path_type=Path), help="PLAN.h5 to run.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Instead of [output] run_dir.")
@click.option(
    "--resume",
    default="none",
    show_default=True,
    metavar="auto|none|PATH",
    help="Go on from the newest good checkpoint of the run, from nothing, or from this one.",
)
@click.option("--init", type=click.Path(path_type=Path), help="Start from this safetensors file.")
@click.option(
    "--replan",
    type=click.Choice(["never", "auto"]),
    default="never",
    show_default=True,
    help="Plan again if the ranks or hosts are not those that the plan is for.",
)
@json_option
def command(
    config: Path, plan_path: Path, run_dir: Path | None, resume: str, init: Path | None, replan: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Train the model of CONFIG as a plan says, under mpirun or srun.

    Progress goes to stderr, the result to stdout; metrics.jsonl in the run directory holds
    the loss of every microbatch, checkpoints/ what --resume and pdmpi export read.

    Signals (USR1, USR2, TERM) and the batch job's time limit checkpoint the run and end it
    with exit code 75; the same command goes on from there.

    \b
    Examples:
      mpirun -n 4 pdmpi train configs/digits.toml --plan plan.h5
      srun --mpi=pmix pdmpi train run.toml --plan plan.h5 --run-dir $SCRATCH/run1
      mpirun -n 3 pdmpi train run.toml --plan plan-of-4.h5 --resume auto --replan auto
      pdmpi train run.toml --plan one-rank.h5 --resume none --init model.safetensors --json
    """
    run = _read(config)
    from pdmpi.model.no_compiler import without_compiler
    from pdmpi.runtime.agree import from_rank_0
    from pdmpi.runtime.keeper import Keeper
    from pdmpi.runtime.network import network_notes
    from pdmpi.runtime.place import open_transport
    from pdmpi.runtime.replan import fitted
    from pdmpi.runtime.setup import label_of, load_datasets
    from pdmpi.runtime.trainer import Trainer
    from pdmpi.runtime.watch import Watch

    job = JobEnvironment.of(os.environ)
    signals = run.checkpoint.signals if run.checkpoint.enabled else ()
    transport, device, notes = open_transport(run)
    is_first = transport.rank == 0
    limit = end_time(job, os.environ) if is_first else None
    notice = _say if is_first else _mute
    with (
        without_compiler(),
        contextlib.ExitStack() as held,
        StopRequest(signals, deadline_unix_s=limit, margin_s=run.checkpoint.margin_s, notice=notice) as stop,
    ):
        plan = plan_from_bytes(from_rank_0(transport, lambda: plan_to_bytes(load_plan(plan_path))))
        plan = fitted(plan, transport, replan == "auto", run.schedule, notice, device)
        directory = run_dir or Path(run.output.run_dir)
        label = label_of(plan, transport.rank) or "no stage"
        stages = [place.stage for place in plan.placement if place.rank == transport.rank]
        with Watch(transport, label, stages) as watch:
            transport.describe = watch.describe
            shown = _Shown(run, plan, directory, is_first)
            for line in notes:
                notice(line)
            trainer = Trainer(run, plan, transport, load_datasets(run), shown, device, watch.recorder)
            held.callback(trainer.close)
            from_rank_0(transport, lambda: _lock(directory, job, held))  # after all checks of the input
            for line in network_notes(plan, transport, [peer.host for peer in watch.peers]):
                notice(line)
            keeper = Keeper(
                run, plan, trainer, transport, run_dir=directory, job=job, stop=stop, notice=shown.notice
            )
            with transport.heartbeat(run.runtime.silence_timeout_s):
                position = keeper.start(resume, init)
                shown.open(trainer.minibatches, position.total)
                while not trainer.is_trained(position):
                    epoch = position.epoch
                    position = trainer.epoch(position, keeper.drained)
                    if run.train.evaluate_every and (epoch + 1) % run.train.evaluate_every == 0:
                        trainer.evaluate(epoch)
                        keeper.drained(position)  # a pass may take long, and a signal come meanwhile
                keeper.finish(position)
            shown.close(trainer.program, as_json)
    transport.close()


def _read(config: Path) -> RunConfig:
    """Read the configuration; MPI is started when it is wrong, so that its ranks say so once."""
    try:
        return load_config(config)
    except InputError:
        import pdmpi.transport.mpi  # noqa: F401

        raise


def _lock(directory: Path, job: JobEnvironment, held: contextlib.ExitStack) -> bytes:
    """Keep other jobs out; after a requeue, wait for what is left of the earlier start to go."""
    lock = RunLock(directory, job=job.job, wait_s=60.0 if job.restarts else 0.0, notice=_say)
    held.callback(lock.release)
    return b""


def _say(line: str) -> None:
    click.echo(f"pdmpi: {line}", err=True)


def _mute(line: str) -> None:
    """Leave it to rank 0 to say."""


def _scaling(report: SegmentReport) -> dict[str, object]:
    return {"loss_scale": report.loss_scale, "skipped_updates": report.skipped}


class _Shown:
    """Shows a run on rank 0: progress and lines on stderr, metrics in the run directory."""

    def __init__(self, run: RunConfig, plan: Plan, run_dir: Path, shown: bool) -> None:
        self._run = run
        self._plan = plan
        self._run_dir = run_dir
        self._is_shown = shown
        self._reports: list[SegmentReport] = []
        self._score: Score | None = None

    def open(self, minibatches: int, trained: int) -> None:
        """Start the metrics file and the progress bar."""
        if not self._is_shown:
            return
        self._metrics = MetricsFile(self._run_dir / "metrics.jsonl")
        self._metrics.write(
            "start",
            schedule=self._plan.schedule.name,
            ranks=self._plan.num_ranks,
            host=socket.gethostname(),
            minibatch_size=self._run.train.minibatch_size,
            minibatches=trained,
        )
        total = self._run.train.steps or (self._run.train.epochs or 0) * minibatches
        self._minibatches = minibatches
        self._bar = Progress("training", total)
        self._bar.__enter__()

    def notice(self, text: str) -> None:
        """Print a line."""
        _say(text)

    def progress(self, epoch: int, done: int, total: int, loss: float) -> None:
        """Move the bar."""
        note = f"epoch {epoch + 1}" + ("" if math.isnan(loss) else f" loss {loss:.4f}")
        self._bar.update(epoch * self._minibatches + done, note)

    def segment(self, report: SegmentReport) -> None:
        """Keep a program's report."""
        self._reports.append(report)
        parts = self._run.schedule.microbatches
        for k, loss in report.losses.items():
            minibatch = report.first_minibatch + k // parts
            self._metrics.write("loss", epoch=report.epoch, minibatch=minibatch, loss=loss)
        self._metrics.write(
            "segment",
            epoch=report.epoch,
            minibatches=report.minibatches,
            loss=report.loss,
            learning_rate=report.learning_rate,
            duration_s=report.duration_s,
            samples_per_s=report.samples_per_s,
            version_lag=[asdict(lag) for lag in StageLag.of(report.lags)],
            **({} if report.loss_scale is None else _scaling(report)),
            ranks=[
                {
                    "label": r.label,
                    "compute_s": r.compute_s,
                    "wait_s": r.wait_s,
                    "instructions": r.instructions,
                }
                for r in report.ranks
            ],
        )

    def evaluated(self, epoch: int, score: Score) -> None:
        """Keep and print a score."""
        self._score = score
        self._metrics.write("evaluation", epoch=epoch, loss=score.loss, accuracy=score.accuracy)
        right = "" if score.accuracy is None else f", accuracy {score.accuracy:.2%}"
        line = f"epoch {epoch + 1}: test loss {score.loss:.4f}{right}"
        if self._reports:  # none when the checkpoint that was resumed from ended the epoch
            trained = self._reports[-1]
            line += f", training loss {trained.loss:.4f}, {trained.samples_per_s:.0f} samples/s"
        self.notice(line)

    def close(self, program: Callable[[int], CheckedProgram], as_json: bool) -> None:
        """Print the result; ``program`` returns what was run, by its minibatches."""
        if not self._is_shown:
            return
        self._bar.__exit__(None, None, None)
        if not self._reports:
            self._metrics.close()
            emit({"samples": 0, "run_dir": self._run_dir}, f"{self._run_dir}: trained already", as_json)
            return
        samples = sum(r.samples for r in self._reports)
        seconds = sum(r.duration_s for r in self._reports)
        predicted = self._predicted_s(program)
        data = {
            "schedule": self._plan.schedule.name,
            "num_ranks": self._plan.num_ranks,
            "samples": samples,
            "training_s": seconds,
            "samples_per_s": samples / seconds,
            "predicted_samples_per_s": samples / predicted,
            "measured_over_predicted": predicted / seconds,
            "loss": self._reports[-1].loss,
            "version_lag": [asdict(lag) for lag in self._lags()],
            "test_loss": self._score.loss if self._score else None,
            "test_accuracy": self._score.accuracy if self._score else None,
            "ranks": [
                {"label": label, "compute_s": compute, "wait_s": wait, "busy": compute / seconds}
                for label, compute, wait in self._by_rank()
            ],
            "run_dir": str(self._run_dir),
        }
        self._metrics.write("end", **{k: v for k, v in data.items() if k != "ranks"})
        self._metrics.close()
        emit(data, [*self._tables(data)], as_json)

    def _lags(self) -> tuple[StageLag, ...]:
        total: dict[int, Counter[int]] = {}
        for report in self._reports:
            for stage, counts in report.lags.items():
                total.setdefault(stage, Counter()).update(counts)
        return StageLag.of(total)

    def _by_rank(self) -> list[tuple[str, float, float]]:
        rows = zip(*(r.ranks for r in self._reports), strict=True)
        return [(of[0].label, sum(r.compute_s for r in of), sum(r.wait_s for r in of)) for of in rows]

    def _predicted_s(self, program: Callable[[int], CheckedProgram]) -> float:
        costs = costs_of(self._plan)
        sizes: dict[int, float] = {}
        for report in self._reports:
            if report.minibatches not in sizes:
                run = program(report.minibatches).program
                sizes[report.minibatches] = simulate(run, costs).duration_s
        return sum(sizes[report.minibatches] for report in self._reports)

    def _tables(self, data: dict[str, object]) -> list[Table]:
        seconds = sum(r.duration_s for r in self._reports)
        busy = [
            (rank, label, human_seconds(compute), human_seconds(wait), f"{compute / seconds:.1%}")
            for rank, (label, compute, wait) in enumerate(self._by_rank())
        ]
        accuracy = data["test_accuracy"]
        result = [
            ("schedule", data["schedule"]),
            ("samples trained", data["samples"]),
            ("training time", human_seconds(seconds)),
            ("measured throughput", f"{data['samples_per_s']:.1f} samples/s"),
            ("predicted throughput", f"{data['predicted_samples_per_s']:.1f} samples/s"),
            ("measured / predicted", f"{data['measured_over_predicted']:.1%}"),
            ("training loss, last program", f"{data['loss']:.4f}"),
        ]
        lags = self._lags()
        scaled = self._reports[-1]
        if scaled.loss_scale is not None:
            result.append(("loss scale", f"{scaled.loss_scale:g}, {scaled.skipped} updates left out"))
        result.append(("version lag by stage, most", ", ".join(str(lag.max) for lag in lags)))
        result.append(("version lag by stage, mean", ", ".join(f"{lag.mean:.2f}" for lag in lags)))
        if accuracy is not None:
            result.append(("test accuracy", f"{accuracy:.2%}"))
        result.append(("metrics", str(self._run_dir / "metrics.jsonl")))
        return [
            table("ranks", ["rank", "stage, replica", "computing", "waiting", "busy"], busy),
            table("result", ["what", "value"], result),
        ]
