"""The training loop: programs one after the other, an evaluation pass between epochs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from pdmpi.config.run import RunConfig
from pdmpi.errors import InputError
from pdmpi.model.example import dtype_of, microbatch_size
from pdmpi.model.factory import load_factory
from pdmpi.model.lr_schedule import LrSchedule
from pdmpi.plan.plan import Plan
from pdmpi.runtime.clock import DeviceClock
from pdmpi.runtime.evaluation import Score, Scorer, score_problems
from pdmpi.runtime.executor import Executor
from pdmpi.runtime.feed import Feed, epoch_order, feed, padded_order
from pdmpi.runtime.limit import limit_notes
from pdmpi.runtime.player import Criterion
from pdmpi.runtime.recorder import Recorder
from pdmpi.runtime.report import Listener, RankReport, SegmentReport
from pdmpi.runtime.setup import (
    Datasets,
    Rank,
    build_rank,
    check_fit,
    label_of,
    quantum_of,
    recomputation_problems,
    trace_run,
    training_program,
    waiting_problems,
)
from pdmpi.runtime.statistics import average_statistics
from pdmpi.schedule.check import CheckedProgram, check
from pdmpi.schedule.evaluation import evaluation
from pdmpi.schedule.program import Op
from pdmpi.schedule.topology import topology_of
from pdmpi.simulate.timeline import Timeline
from pdmpi.transport.base import Transport

__all__ = ["Position", "Trainer", "segments"]

_COMPUTE = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.UPDATE)
_WAITS = (Op.WAIT_RECV, Op.WAIT_SEND, Op.WAIT_REDUCE)


_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run is.

    Attributes
    ----------
    epoch
        Counted from 0.
    minibatch
        Minibatches of the epoch that are done.
    total
        Minibatches of the run that are done.
    """

    epoch: int = 0
    minibatch: int = 0
    total: int = 0


def segments(minibatches: int, longest: int, quantum: int) -> list[int]:
    """Divide an epoch into programs of at most ``longest`` minibatches, whole rounds each."""
    step = max(longest // quantum, 1) * quantum
    return [min(step, minibatches - start) for start in range(0, minibatches, step)]


class Trainer:
    """Trains one model as a plan says; every rank makes one at the same time.

    Parameters
    ----------
    config, plan
        What to run.
    transport
        Of this rank.
    datasets
        Training and test set.
    listener
        Told what happens, on rank 0.
    device
        Where this rank computes.
    recorder
        Is told which instruction is run.

    Raises
    ------
    InputError
        When plan, configuration, data and ranks do not fit together.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        transport: Transport,
        datasets: Datasets,
        listener: Listener,
        device: torch.device = _HOST,
        recorder: Recorder | None = None,
    ) -> None:
        torch.set_num_threads(config.train.threads)
        self.config = config
        self.plan = plan
        self._transport = transport
        self._datasets = datasets
        self._listener = listener
        self._device = device
        self._recorder = recorder
        self._clock = DeviceClock() if device.type == "cuda" else None
        self._told: set[str] = set()
        self._size = microbatch_size(config)
        self._topology = topology_of(plan)
        traced = self._traced = trace_run(config, datasets.train)
        check_fit(config, plan, traced, transport.size)
        InputError.collect(waiting_problems(config, plan, traced))
        if datasets.test is not None:
            InputError.collect(score_problems(traced, len(datasets.test), self._size))  # type: ignore[arg-type]
        self._quantum = quantum_of(plan.schedule, self._topology)
        self._check_steps()
        self.minibatches = self._minibatches_of_epoch()
        if config.optimizer.lr_schedulers:
            steps = self.epochs if config.optimizer.lr_interval == "epoch" else self._total()
            InputError.collect(LrSchedule(config.optimizer).ends_early(steps))
        if transport.rank == 0:
            for line in limit_notes(config, plan):
                listener.notice(line)
        self._programs: dict[int, CheckedProgram] = {}
        self._test = self._test_program()
        sizes = sorted(set(segments(self.minibatches, config.checkpoint.every_minibatches, self._quantum)))
        for size in sizes:
            self.program(size)
        programs = [self._programs[size].program for size in reversed(sizes)]
        InputError.collect(recomputation_problems(plan, traced, programs[0]))
        others = [*programs[1:], *([self._test.program] if self._test else [])]
        self.rank: Rank = build_rank(config, plan, traced, programs[0], others, transport, device)
        self._loss: Callable[[Any, Any], Tensor] = load_factory(config.loss.factory)(**config.loss.args)

    def program(self, size: int) -> CheckedProgram:
        """Return the program that trains so many minibatches."""
        if size not in self._programs:
            self._programs[size] = check(training_program(self.config, self.plan, self._traced, size))
        return self._programs[size]

    @property
    def epochs(self) -> int:
        """Epochs of the run, the last one perhaps not whole."""
        steps = self.config.train.steps
        return self.config.train.epochs or -(-(steps or 0) // self.minibatches)

    def _total(self) -> int:
        """Return the minibatches of the run."""
        return self.config.train.steps or self.epochs * self.minibatches

    def close(self) -> None:
        """Give up what must not outlive the transport; nothing can be run any more."""
        for player in self.rank.players.values():
            player.close()

    def is_trained(self, position: Position) -> bool:
        """Whether nothing is left to train, wherever in an epoch that is for this plan."""
        steps = self.config.train.steps
        return position.epoch >= self.epochs or (steps is not None and position.total >= steps)

    def epoch(self, position: Position, after: Callable[[Position], None] = lambda _: None) -> Position:
        """Train the rest of an epoch from a position on.

        Parameters
        ----------
        position
            Where to start: at the start of an epoch, or of one of its programs.
        after
            Called after each program, drained.
        """
        order = epoch_order(len(self._datasets.train), self.config.train.seed, position.epoch)  # type: ignore[arg-type]
        left = self.minibatches - position.minibatch
        if self.config.train.steps is not None:
            left = min(left, self.config.train.steps - position.total)
        left = max(left - left % self._quantum, 0)
        for size in segments(left, self.config.checkpoint.every_minibatches, self._quantum):
            self._train(order, position, size)
            position = Position(position.epoch, position.minibatch + size, position.total + size)
            after(position)
        return Position(position.epoch + 1, 0, position.total)

    def evaluate(self, epoch: int) -> Score | None:
        """Run the test set through the pipeline; the score is known on rank 0."""
        if self._test is None:
            return None
        test = self._datasets.test
        count = len(test)  # type: ignore[arg-type]
        unflatten = partial(self.rank.traced.unflatten, training=False)
        scorer = Scorer(count, self._size, self._loss, unflatten)
        order = padded_order(count, self._size)
        self._run(self._test, test, order, training=False, criterion=scorer)
        score = scorer.score
        correct = -1 if score.correct is None else score.correct
        packed = np.array([score.samples, score.loss_sum, correct, score.predictions])
        gathered = self._transport.gather(packed.tobytes())
        total = Score()
        for part in (np.frombuffer(data) for data in gathered):
            hits = None if part[2] < 0 else int(part[2])
            total += Score(int(part[0]), float(part[1]), hits, int(part[3]))
        if self._transport.rank == 0:
            self._listener.evaluated(epoch, total)
        return total

    def timeline(self) -> Timeline | None:
        """Gather the measured timeline of the last program, on rank 0; every rank calls it."""
        executor = self._last
        packed = np.concatenate([executor.start_s, executor.end_s])
        parts = [np.frombuffer(data) for data in self._transport.gather(packed.tobytes())]
        if not parts:
            return None
        halves = [part.reshape(2, -1) for part in parts]
        return Timeline(executor.program, tuple(h[0] for h in halves), tuple(h[1] for h in halves))

    def _train(self, order: NDArray[np.int64], position: Position, size: int) -> None:
        checked = self.program(size)
        samples = size * self.config.train.minibatch_size
        start = position.minibatch * self.config.train.minibatch_size
        loss, unflatten = self._loss, self.rank.traced.unflatten
        first = min(self.rank.players)
        done = 0

        def progress(k: int) -> None:
            nonlocal done
            done += 1
            minibatches = done * len(self._topology.ranks[first]) // self.config.schedule.microbatches
            held = self.rank.players[first].losses.get(k)
            known = held if isinstance(held, float) else float("nan")
            self._listener.progress(position.epoch, position.minibatch + minibatches, self.minibatches, known)

        executor = self._run(
            checked,
            self._datasets.train,
            order[start : start + samples],
            first=position.total * self.config.schedule.microbatches,
            epoch=position.epoch,
            training=True,
            criterion=lambda values, target, _: loss(unflatten(values), target),
            progress=progress if self._transport.rank == 0 else None,
        )
        for stage, player in self.rank.players.items():
            average_statistics(player.module, self._transport, self._topology.ranks[stage])
        if self._device.type == "cuda":
            self._tell_why_eager()
        reports = self._transport.gather(self._report(executor).to_json())
        ends = self._transport.gather(np.array(executor.end_s[-1:]).tobytes())
        if self._transport.rank == 0:
            scale = self.rank.loss_scale
            optimizer = self.rank.players[min(self.rank.players)].weights.optimizer
            report = SegmentReport(
                epoch=position.epoch,
                first_minibatch=position.minibatch,
                minibatches=size,
                samples=samples,
                duration_s=max(float(np.frombuffer(end).max(initial=0.0)) for end in ends),
                ranks=tuple(map(RankReport.from_json, reports)),
                learning_rate=None if optimizer is None else float(optimizer.param_groups[0]["lr"]),
                loss_scale=None if scale is None else scale.value,
                skipped=0 if scale is None else scale.skipped,
            )
            self._listener.segment(report)

    def _tell_why_eager(self) -> None:
        """Say once, on rank 0, why kernels of any rank are launched one by one though graphs are wanted."""
        off, partly = "CUDA graphs are off", "CUDA graphs play some microbatches only"
        found = [(off, self.rank.why_eager)]
        for player in self.rank.players.values():
            found += [(off, player.why_eager), (partly, player.why_partly)]
        texts = [f"{what}, kernels are launched one by one: {why}" for what, why in found if why]
        for part in self._transport.gather(json.dumps(texts).encode()):
            for text in json.loads(part):
                if text not in self._told and self.config.runtime.cuda_graphs:
                    self._told.add(text)
                    self._listener.notice(text)

    def _run(
        self,
        checked: CheckedProgram,
        dataset: Dataset[Any] | None,
        order: NDArray[np.int64],
        *,
        training: bool,
        criterion: Criterion,
        first: int = 0,
        epoch: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> Executor:
        for stage, player in self.rank.players.items():
            player.follow(checked.program.rows[self._transport.rank].tolist(), stage)
            player.begin(
                training,
                self._feed(checked, stage, dataset, order, first),
                criterion if self.rank.computes_loss[stage] else None,
                first,
                epoch,
            )
        settle = torch.cuda.synchronize if self._device.type == "cuda" else _nothing
        executor = Executor(
            checked, self._transport.rank, self.rank.players, self.rank.mailbox, self.rank.joint,
            progress, settle,
            self._recorder, self._clock,
        )  # fmt: skip
        self._transport.barrier()
        executor.run()
        self._last = executor
        return executor

    def _feed(
        self,
        checked: CheckedProgram,
        stage: int,
        dataset: Dataset[Any] | None,
        order: NDArray[np.int64],
        first: int,
    ) -> Feed | None:
        reads, targets = self.rank.reads_input[stage], self.rank.computes_loss[stage]
        if not (reads or targets) or dataset is None:
            return None
        rows = checked.program.rows[self._transport.rank]
        chosen = rows[(rows[:, 0] == Op.FORWARD) & (rows[:, 1] == stage)]
        return feed(
            dataset,
            order,
            self._size,
            chosen[:, 2].tolist(),
            flatten=self.rank.traced.flatten if reads else None,
            with_target=targets,
            dtype=dtype_of(self.config),
            device=self._device,
            seed=self.config.train.seed,
            first=first,
        )

    def _report(self, executor: Executor) -> RankReport:
        rows = executor.program.rows[self._transport.rank]
        spent = executor.end_s - executor.start_s
        losses = [p.loss_values() for s, p in self.rank.players.items() if self.rank.computes_loss[s]]
        return RankReport(
            label=label_of(self.plan, self._transport.rank),
            compute_s=_sum_over(rows, spent, _COMPUTE),
            wait_s=_sum_over(rows, spent, _WAITS),
            instructions=len(rows),
            losses=losses[0] if losses else {},
            lags={stage: dict(player.lags) for stage, player in self.rank.players.items()},
        )

    def _check_steps(self) -> None:
        steps, unit = self.config.train.steps, self._quantum
        if steps is not None and steps % unit:
            below = steps // unit * unit
            raise InputError(
                f"[train] steps = {steps} does not fill rounds over the plan's replicas; set it to "
                + (f"{below} or {below + unit}" if below else f"{unit}")
            )

    def _minibatches_of_epoch(self) -> int:
        count = len(self._datasets.train)  # type: ignore[arg-type]
        size = self.config.train.minibatch_size
        whole = count // size // self._quantum * self._quantum
        if not whole:
            raise InputError(
                f"[data] the training set holds {count} samples, one round of the plan needs "
                f"{size * self._quantum} ([train] minibatch_size = {size}); lower minibatch_size"
            )
        left = count - whole * size
        if left and self._transport.rank == 0:
            self._listener.notice(
                f"each epoch trains {whole} minibatches of {size}; {left} of {count} samples sit out, "
                "others in each epoch"
            )
        return whole

    def _test_program(self) -> CheckedProgram | None:
        if self._datasets.test is None:
            return None
        count = len(self._datasets.test)  # type: ignore[arg-type]
        return check(evaluation(self._topology, -(-count // self._size)))


def _nothing() -> None:
    """Wait for nothing: the host computes as it goes."""


def _sum_over(rows: NDArray[np.int32], spent: NDArray[np.float64], ops: Sequence[Op]) -> float:
    return float(spent[np.isin(rows[:, 0], [int(op) for op in ops])].sum())
