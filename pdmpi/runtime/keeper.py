"""Keeps a run: resumes it at its start, writes it when the pipeline is drained, stops it when asked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pdmpi.checkpoint.arrays import Array, Snapshot
from pdmpi.checkpoint.safetensors import SafetensorsFile
from pdmpi.checkpoint.status import RunStatus, State, write_status
from pdmpi.checkpoint.store import Checkpoint, latest, open_checkpoint
from pdmpi.checkpoint.writer import CheckpointWriter
from pdmpi.config.run import RunConfig
from pdmpi.errors import InputError, Requeue
from pdmpi.plan.plan import Plan
from pdmpi.runtime.state import (
    array_of,
    masters_by_name,
    restore,
    snapshot_of,
    state_names,
    tensor_of,
)
from pdmpi.runtime.trainer import Position, Trainer
from pdmpi.slurm.environment import JobEnvironment
from pdmpi.slurm.signals import StopRequest
from pdmpi.transport.base import Transport

__all__ = ["Keeper"]

_METRICS = "metrics.jsonl"
_LOSS_SCALE = "loss_scale"


class Keeper:
    """The state of one run on disk; every method is called by all ranks together.

    Parameters
    ----------
    config, plan
        Of the run.
    trainer
        Whose state is kept.
    transport
        Of this rank.
    run_dir
        The run's directory, which rank 0 has locked.
    job
        The batch job.
    stop
        Knows when the run was asked to stop.
    notice
        Called on rank 0 with one line for whatever a person should know.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        trainer: Trainer,
        transport: Transport,
        *,
        run_dir: Path,
        job: JobEnvironment,
        stop: StopRequest,
        notice: Callable[[str], None],
    ) -> None:
        self._config = config
        self._plan = plan
        self._trainer = trainer
        self._transport = transport
        self._run_dir = run_dir
        self._job = job
        self._stop = stop
        self._notice = notice if transport.rank == 0 else lambda _: None
        self._replica = {p.stage: p.replica for p in plan.placement if p.rank == transport.rank}
        self._writer: CheckpointWriter | None = None
        self._last_saved = -1
        self._last_save_s = self._last_drain_s = time.monotonic()
        self._longest_s = 0.0

    def start(self, resume: str, init: Path | None) -> Position:
        """Bring the trainer to where the run is, and say that it is running.

        Parameters
        ----------
        resume
            ``"auto"`` (the newest good checkpoint, if there is one), ``"none"``, or the path
            of a checkpoint or of a run's directory.
        init
            A safetensors file to start from when nothing is resumed.

        Raises
        ------
        InputError
            There is no such checkpoint, it is damaged, or it is another model's or run's.
        """
        checkpoint = self._find(resume)
        position = Position()
        if checkpoint is not None:
            position = self._restore(checkpoint)
            what = f"epoch {position.epoch + 1}, minibatch {position.total}"
            self._notice(f"resumed from {checkpoint.directory} at {what}")
        elif init is not None:
            self._initialise(SafetensorsFile(init))
            self._notice(f"started from {init}")
        if self._config.checkpoint.enabled:
            self._writer = CheckpointWriter(
                self._run_dir,
                group=self._transport,
                writers=self._writers(),
                fingerprint=self._plan.profile.graph.fingerprint,
                keep=self._config.checkpoint.keep,
                start=position.total,
                notice=self._notice,
            )
        if checkpoint is not None and self._is_ours(checkpoint):
            self._last_saved = position.total
        self._last_save_s = self._last_drain_s = time.monotonic()
        self._transport.barrier()
        self.say("running", position)
        return position

    def drained(self, position: Position) -> None:
        """Write a checkpoint if it is time; stop the run if it was asked to.

        Raises
        ------
        Requeue
            On every rank, after the checkpoint is on disk.
        """
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self._last_drain_s)
        self._last_drain_s = now
        ahead_s = self._longest_s + (self._writer.duration_s if self._writer else 0.0)
        reasons = [text.decode() for text in self._transport.gather(self._stop.reason(ahead_s).encode())]
        due = now - self._last_save_s >= self._config.checkpoint.every_s
        decision = json.dumps([next(filter(None, reasons), ""), due]).encode()
        reason, due = json.loads(self._transport.broadcast(decision))
        if self._writer is None:
            return
        if reason or due:
            self._save(self._writer, position)
        if reason:
            kept = self._writer.finish() is not None or self._last_saved == position.total
            what = f"checkpointed at minibatch {position.total}" if kept else "the newest checkpoint is older"
            self.say("requeue", position, reason)
            raise Requeue(f"{reason}: {what}; run it again to go on")

    def finish(self, position: Position) -> None:
        """Write the last checkpoint and say that the run is done."""
        if self._writer is not None:
            self._save(self._writer, position)
            self._writer.finish()
        self.say("done", position)

    def say(self, status: State, position: Position, reason: str = "") -> None:
        """Write how the run stands, for the batch script."""
        if self._transport.rank != 0:
            return
        found = RunStatus(
            status=status,
            minibatch=position.total,
            reason=reason,
            job=self._job.job,
            restarts=self._job.restarts,
        )
        try:
            write_status(self._run_dir, found)
        except OSError as error:
            self._notice(f"{self._run_dir}: the run's status cannot be written ({error.strerror})")

    def _find(self, resume: str) -> Checkpoint | None:
        if resume == "none":
            return None
        if resume == "auto":
            return latest(self._run_dir, self._transport, self._notice)
        path = Path(resume)
        if (path / "checkpoints").is_dir():
            found = latest(path, self._transport, self._notice)
            if found is None:
                raise InputError(f"--resume {resume}: the run has no good checkpoint")
            return found
        problems: list[str] = []
        checkpoint: Checkpoint | None = None
        try:
            checkpoint = open_checkpoint(path)
            problems = checkpoint.verify(self._transport.rank, self._transport.size)
        except InputError as error:
            problems = [str(error)]
        self._agree(f"--resume {resume}: {problem}" for problem in problems)
        return checkpoint

    def _restore(self, checkpoint: Checkpoint) -> Position:
        manifest, problems = checkpoint.manifest, []
        if manifest.fingerprint != self._plan.profile.graph.fingerprint:
            problems.append(f"checkpoint {checkpoint.directory} is of another model; give --resume none")
        for key, value in self._identity().items():
            if manifest.state.get(key) != value:
                problems.append(
                    f"checkpoint {checkpoint.directory} was made with {key} = {manifest.state.get(key)!r},"
                    f" this run has {value!r}: set it back, or start from an export (--resume none --init)"
                )
        InputError.collect(problems)
        try:
            for stage, player in self._trainer.rank.players.items():
                names = state_names(player.module)
                found = checkpoint.read(names, replica=self._replica[stage])
                restore(found, player.module, player.weights.masters, player.weights.optimizer)
            position = Position(*(int(manifest.state[key]) for key in ("epoch", "minibatch", "total")))
            scale = self._trainer.rank.loss_scale
            if scale is not None:
                scale.state = manifest.state.get(_LOSS_SCALE, scale.state)
            problem = ""
        except InputError as error:
            position, problem = Position(), str(error)
        self._agree([problem] if problem else [])
        self._cut_metrics(checkpoint)
        return position

    def _initialise(self, file: SafetensorsFile) -> None:
        """Load the parameters and buffers of this rank's stages, converted to the run's dtype."""
        problem = ""
        try:
            for player in self._trainer.rank.players.values():
                own, masters = player.module.state_dict(), player.weights.masters
                shared = masters_by_name(player.module, masters)
                arrays = {
                    name: array_of(tensor_of(array).to(shared.get(name, own[name]).dtype))
                    for name, array in file.read(list(own)).items()
                }
                restore(Snapshot(parameters=arrays), player.module, masters, None)
        except InputError as error:
            problem = f"--init: {error}"
        self._agree([problem] if problem else [])

    def _save(self, writer: CheckpointWriter, position: Position) -> None:
        if position.total == self._last_saved:
            return
        is_writer = self._transport.rank in writer.writers
        state: dict[str, Any] = {
            "epoch": position.epoch,
            "minibatch": position.minibatch,
            "total": position.total,
            **self._identity(),
        }
        scale = self._trainer.rank.loss_scale
        if scale is not None:
            state[_LOSS_SCALE] = list(scale.state)
        metrics = self._run_dir / _METRICS
        if self._transport.rank == 0 and metrics.exists():
            state["metrics_bytes"] = metrics.stat().st_size
        if writer.save(position.total, self._snapshot() if is_writer else None, state):
            self._last_saved = position.total
        self._last_save_s = time.monotonic()

    def _snapshot(self) -> Snapshot:
        parameters: dict[str, Array] = {}
        buffers: dict[str, Array] = {}
        optimizer: dict[str, Mapping[str, Array]] = {}
        others: dict[int, dict[str, Array]] = {}
        for stage, player in self._trainer.rank.players.items():
            player.weights.select(0)
            taken = snapshot_of(player.module, player.weights.masters, player.weights.optimizer)
            replica = self._replica[stage]
            if replica:
                own = _replica_buffers(player.module)
                others.setdefault(replica, {}).update({name: taken.buffers[name] for name in own})
            else:
                parameters.update(taken.parameters)
                buffers.update(taken.buffers)
                optimizer.update(taken.optimizer)
        return Snapshot(parameters=parameters, buffers=buffers, optimizer=optimizer, replica_buffers=others)

    def _writers(self) -> list[int]:
        """Return the ranks that have something to write: not replicas that differ in nothing."""
        players = self._trainer.rank.players
        writes = any(not self._replica[s] or _replica_buffers(p.module) for s, p in players.items())
        flags = self._transport.gather(b"1" if writes else b"0")
        packed = json.dumps([rank for rank, flag in enumerate(flags) if flag == b"1"]).encode()
        writers: list[int] = json.loads(self._transport.broadcast(packed))
        return writers

    def _identity(self) -> dict[str, Any]:
        """Return what a resumed run must have in common with the run that it goes on with."""
        config = self._config
        return {
            "[train] seed": config.train.seed,
            "[train] minibatch_size": config.train.minibatch_size,
            "[train] dtype": config.train.dtype,
            "[optimizer] name": config.optimizer.name,
        }

    def _cut_metrics(self, checkpoint: Checkpoint) -> None:
        """Drop metrics of minibatches that will be trained again, so that curves do not overlap."""
        size = checkpoint.manifest.state.get("metrics_bytes")
        path = self._run_dir / _METRICS
        if not isinstance(size, int) or not self._is_ours(checkpoint):
            return
        if self._transport.rank == 0 and path.exists():
            with path.open("r+b") as file:
                file.truncate(min(size, path.stat().st_size))

    def _is_ours(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint was written by this very run, not by another that this one starts from."""
        return checkpoint.directory.parent.parent.resolve() == self._run_dir.resolve()

    def _agree(self, problems: Iterable[str]) -> None:
        """Raise the same error on every rank when one of them found a problem."""
        told = self._transport.gather(json.dumps(list(problems)).encode())
        merged = dict.fromkeys(line for part in told for line in json.loads(part))
        InputError.collect(json.loads(self._transport.broadcast(json.dumps(list(merged)).encode())))


def _replica_buffers(module: nn.Module) -> list[str]:
    """Return the persistent buffers in which replicas of a stage may differ (all but averaged statistics)."""
    found = []
    for path, part in module.named_modules():
        if not isinstance(part, _NormBase):
            kept = part._non_persistent_buffers_set
            found += [f"{path}.{n}" if path else n for n in part._buffers if n not in kept]
    return [name for name in found if name in module.state_dict()]
