"""``pdmpi train``: train a model as a plan says, one MPI rank a replica of a stage."""

from __future__ import annotations

import math
import socket
from pathlib import Path

import click
from rich.table import Table

from pdmpi.cli.output import Progress, emit, human_seconds, json_option, table
from pdmpi.config.load import load_config
from pdmpi.config.run import RunConfig
from pdmpi.plan.plan import Plan
from pdmpi.plan.store import load_plan, plan_from_bytes, plan_to_bytes
from pdmpi.runtime.evaluation import Score
from pdmpi.runtime.report import MetricsFile, SegmentReport
from pdmpi.schedule.registry import program_of
from pdmpi.simulate.costs import costs_of
from pdmpi.simulate.engine import simulate

__all__ = ["command"]


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--plan", "plan_path", required=True, type=click.Path(path_type=Path), help="PLAN.h5 to run.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Instead of [output] run_dir.")
@json_option
def command(config: Path, plan_path: Path, run_dir: Path | None, as_json: bool) -> None:
    """Train the model of CONFIG as a plan says, under mpirun or srun.

    Progress goes to stderr, the result to stdout; metrics.jsonl in the run directory holds
    the loss of every microbatch.

    \b
    Examples:
      mpirun -n 4 pdmpi train configs/digits.toml --plan plan.h5
      srun --mpi=pmix pdmpi train run.toml --plan plan.h5 --run-dir $SCRATCH/run1
      pdmpi train run.toml --plan one-rank.h5 --json
    """
    run = load_config(config)
    from pdmpi.runtime.agree import from_rank_0
    from pdmpi.runtime.setup import label_of, load_datasets
    from pdmpi.runtime.trainer import Position, Trainer
    from pdmpi.runtime.watch import Watch
    from pdmpi.transport.mpi import MpiTransport

    transport = MpiTransport(run.runtime.stall_timeout_s)
    plan = plan_from_bytes(from_rank_0(transport, lambda: plan_to_bytes(load_plan(plan_path))))
    label = label_of(plan, transport.rank) or "no stage"
    with Watch(transport, label) as watch:
        transport.describe = watch.describe
        datasets = load_datasets(run)
        shown = _Shown(run, plan, run_dir or Path(run.output.run_dir), transport.rank == 0)
        trainer = Trainer(run, plan, transport, datasets, shown)
        shown.open(trainer.minibatches, watch.describe)
        position = Position()
        for epoch in range(trainer.epochs):
            position = trainer.epoch(position)
            if run.train.evaluate_every and (epoch + 1) % run.train.evaluate_every == 0:
                trainer.evaluate(epoch)
        shown.close(as_json)
    transport.close()


class _Shown:
    """Shows a run on rank 0: progress and lines on stderr, metrics in the run directory."""

    def __init__(self, run: RunConfig, plan: Plan, run_dir: Path, shown: bool) -> None:
        self._run = run
        self._plan = plan
        self._run_dir = run_dir
        self._is_shown = shown
        self._reports: list[SegmentReport] = []
        self._score: Score | None = None

    def open(self, minibatches: int, describe: object) -> None:
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
        )
        total = self._run.train.steps or (self._run.train.epochs or 0) * minibatches
        self._minibatches = minibatches
        self._bar = Progress("training", total)
        self._bar.__enter__()

    def notice(self, text: str) -> None:
        """Print a line."""
        click.echo(f"pdmpi: {text}", err=True)

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
            duration_s=report.duration_s,
            samples_per_s=report.samples_per_s,
            ranks=[
                {"label": r.label, "compute_s": r.compute_s, "wait_s": r.wait_s, "instructions": r.instructions}
                for r in report.ranks
            ],
        )

    def evaluated(self, epoch: int, score: Score) -> None:
        """Keep and print a score."""
        self._score = score
        self._metrics.write("evaluation", epoch=epoch, loss=score.loss, accuracy=score.accuracy)
        right = "" if score.accuracy is None else f", accuracy {score.accuracy:.2%}"
        trained = self._reports[-1]
        self.notice(
            f"epoch {epoch + 1}: loss {trained.loss:.4f}, test loss {score.loss:.4f}{right}, "
            f"{trained.samples_per_s:.0f} samples/s"
        )

    def close(self, as_json: bool) -> None:
        """Print the result."""
        if not self._is_shown:
            return
        self._bar.__exit__(None, None, None)
        samples = sum(r.samples for r in self._reports)
        seconds = sum(r.duration_s for r in self._reports)
        predicted = self._predicted_s()
        data = {
            "schedule": self._plan.schedule.name,
            "num_ranks": self._plan.num_ranks,
            "samples": samples,
            "training_s": seconds,
            "samples_per_s": samples / seconds,
            "predicted_samples_per_s": samples / predicted,
            "measured_over_predicted": predicted / seconds,
            "loss": self._reports[-1].loss,
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

    def _by_rank(self) -> list[tuple[str, float, float]]:
        rows = zip(*(r.ranks for r in self._reports), strict=True)
        return [(of[0].label, sum(r.compute_s for r in of), sum(r.wait_s for r in of)) for of in rows]

    def _predicted_s(self) -> float:
        costs = costs_of(self._plan)
        sizes: dict[int, float] = {}
        for report in self._reports:
            if report.minibatches not in sizes:
                program = program_of(self._plan, report.minibatches)
                sizes[report.minibatches] = simulate(program, costs).duration_s
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
        if accuracy is not None:
            result.append(("test accuracy", f"{accuracy:.2%}"))
        result.append(("metrics", str(self._run_dir / "metrics.jsonl")))
        return [
            table("ranks", ["rank", "stage, replica", "computing", "waiting", "busy"], busy),
            table("result", ["what", "value"], result),
        ]
