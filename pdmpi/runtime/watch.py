"""Nobody waits for ever for a rank that died or failed, and its stage is named."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from pdmpi.errors import PdmpiError, RankFailure
from pdmpi.runtime.guardian import DONE, TOLD, instruction_at, state_of
from pdmpi.runtime.recorder import Recorder
from pdmpi.schedule.program import TEMPLATES
from pdmpi.transport.base import Transport
from pdmpi.transport.share import share

__all__ = ["Peer", "Watch"]

_SUSPECT = {"": "is gone", "Z": "is dead", "X": "is dead", "T": "is stopped", "t": "is stopped by a debugger"}


@dataclass(frozen=True, slots=True)
class Peer:
    """Who a rank is.

    Attributes
    ----------
    label
        What it runs: ``"stage 1, replica 0"``.
    host
        Name of its host.
    space
        The same for ranks that can see each other's process ids.
    pid
        Process id.
    recorder
        Descriptor of its `Recorder`.
    pipe
        Descriptor of a pipe that only its own exit closes.
    stages
        The stages that it plays.
    """

    label: str
    host: str
    space: str
    pid: int
    recorder: int
    pipe: int
    stages: tuple[int, ...]


class Watch:
    """Ends the job when a rank dies, names it, and stays silent at an orderly end.

    A context manager around all that a rank does together with others; every rank enters
    it at the same time.  On each host one rank starts a `guardian` for all of them.

    An exception that leaves it is shown with rank and stage, except those that every rank
    raises alike (bad input, a requeue).  It goes on to the command's entry point, which
    ends the world.

    Parameters
    ----------
    transport
        Tells each rank who the others are.
    label
        What this rank runs: ``"stage 1, replica 0"``.
    stages
        The stages that it plays.

    Attributes
    ----------
    recorder
        Takes note of this rank's instructions.
    """

    def __init__(self, transport: Transport, label: str, stages: Collection[int] = ()) -> None:
        self._transport = transport
        self.recorder = Recorder()
        self._pipe = os.pipe()
        host = socket.gethostname()
        space = f"{host}:{_pid_namespace()}"
        me = Peer(label, host, space, os.getpid(), self.recorder.descriptor, self._pipe[0], tuple(stages))
        everyone = share(transport, asdict(me))
        self.peers = [Peer(**{**peer, "stages": tuple(peer["stages"])}) for peer in everyone]
        self._near = [rank for rank, peer in enumerate(self.peers) if peer.space == space]
        self._guardian: subprocess.Popen[bytes] | None = None

    def describe(self, rank: int) -> str:
        """Return ``"rank 2 (stage 1, replica 0, host h, pid 123)"``."""
        peer = self.peers[rank]
        return f"rank {rank} ({peer.label}, host {peer.host}, pid {peer.pid})"

    def __enter__(self) -> Watch:
        if self._near[0] == self._transport.rank and len(self.peers) > 1:
            self._guardian = self._start_guardian()
        self._transport.barrier()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.recorder.say(TOLD)
            self._tell(error)
            return
        self._transport.barrier()
        self.recorder.say(DONE)
        if self._guardian is not None:
            self._guardian.communicate(b"e")
        self.recorder.close()
        for end in self._pipe:
            os.close(end)

    def _start_guardian(self) -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("guardian.py")
        guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(program)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        near = [(rank, self.peers[rank]) for rank in self._near]
        watched = [(self.describe(rank), peer.pid, peer.recorder, peer.pipe) for rank, peer in near]
        assert guardian.stdin is not None
        assert guardian.stdout is not None
        guardian.stdin.write(json.dumps([watched, TEMPLATES]).encode() + b"\n")
        guardian.stdin.flush()
        guardian.stdout.read(1)
        return guardian

    def _tell(self, error: BaseException) -> None:
        """Show who failed, and why."""
        me = self.describe(self._transport.rank)
        if isinstance(error, SystemExit):
            failure = RankFailure(f"{me} called sys.exit({error.code!r}) in the middle of the run")
            failure.exit_code = error.code if isinstance(error.code, int) and error.code else 1
            raise failure from error
        if not isinstance(error, PdmpiError):
            _say(f"{me} failed: {type(error).__name__}: {error}")
        elif error.exit_code == PdmpiError.exit_code:
            for rank in self._near:
                state = state_of(self.peers[rank].pid)
                if state in _SUSPECT:
                    self._tell_of(rank, _SUSPECT[state])

    def _tell_of(self, suspect: int, state: str) -> None:
        """Show what a rank that hangs, and those of its host that exchange messages with it, are at."""
        stages = self.peers[suspect].stages
        reach = range(min(stages, default=0) - 1, max(stages, default=0) + 2)
        beside = [
            f"rank {rank}{place}"
            for rank in self._near
            if rank != suspect and (not stages or set(self.peers[rank].stages) & set(reach))
            if (place := self._place_of(rank))
        ]
        others = f"; its neighbours: {', '.join(beside)}" if beside else ""
        _say(f"{self.describe(suspect)} {state}{self._place_of(suspect)}{others}")

    def _place_of(self, rank: int) -> str:
        """Return ``" in instruction 12, FORWARD ..."`` for a rank of this host, or nothing."""
        peer = self.peers[rank]
        try:
            recorder = os.open(f"/proc/{peer.pid}/fd/{peer.recorder}", os.O_RDONLY)
        except OSError:
            return ""
        try:
            return instruction_at(recorder, list(TEMPLATES))
        finally:
            os.close(recorder)


def _pid_namespace() -> int:
    """Identify the processes that this one can see; containers on one host see different ones."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _say(message: str) -> None:
    """Write one whole line, whatever other ranks write at the same time."""
    sys.stderr.flush()
    os.write(2, f"pdmpi: error: {message}\n".encode())
