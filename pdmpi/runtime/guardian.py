"""A small process beside the ranks of a host that says which of them died, and ends the rest.

Run by path as a program, with nothing but the standard library, in a session of its own:
launchers end all ranks within milliseconds of a death (MPICH's by SIGKILL, before any of
them could speak), and leave the guardian alone.  `Watch` starts it and writes to its stdin:
one line of JSON, answered by a byte on stdout, then a byte when the run ends in order.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import time

__all__ = [
    "DONE", "HEAD_BYTES", "NOWHERE", "NUMBER", "NUM_COLUMNS", "TOLD", "WORDS", "instruction_at", "state_of",
]  # fmt: skip

DONE, TOLD = b"done", b"told"
"""Last words of a rank: it ended in order; its failure was already shown."""

HEAD_BYTES = 64
WORDS, NUMBER = slice(0, 16), slice(16, 24)
"""What a rank's recorder holds: last words, the number of its present instruction, and from
``HEAD_BYTES`` on its instructions, rows of 32-bit integers that start with the operation."""

NUM_COLUMNS = 8
"""Integers in a row; the same as the program's (this file imports nothing of the package)."""

NOWHERE = -1
"""The number outside of programs."""

_DIED_GRACE_S = 2.0
_TOLD_GRACE_S = 15.0
"""How long the launcher has to end the others, before they are killed."""
_POLL_S = 0.1

_LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "prted", "hydra_pmi_proxy")
_LAUNCHER_GRACE_S = 10.0
"""How long a launcher has to end once its ranks here are gone: one waits for ever for a host that hangs."""


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process's state, or nothing when there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def instruction_at(recorder: int, templates: list[str]) -> str:
    """Return what a rank is at, ``" in instruction 12, FORWARD s1 k5 ..."``; nothing before any program.

    Parameters
    ----------
    recorder
        Descriptor of its recorder.
    templates
        For each operation, in the order of their numbers, a format string for its row.
    """
    head = os.pread(recorder, HEAD_BYTES, 0)
    number = struct.unpack("q", head[NUMBER])[0] if len(head) == HEAD_BYTES else NOWHERE
    width = 4 * NUM_COLUMNS
    packed = os.pread(recorder, width, HEAD_BYTES + max(number, 0) * width)
    if len(packed) < width:
        return ""
    if number == NOWHERE:
        return " between programs"
    row = struct.unpack(f"{NUM_COLUMNS}i", packed)
    return f" in instruction {number}, {templates[row[0]].format(*row)}"


class _Rank:
    """A process to watch, and its last words.

    Its end of a pipe closes at the start of its exit, together with its connections to the
    launcher and before the launcher can end anyone for it.  Its pidfd, where the system has
    such a thing, tells of the end of its exit, also when a child of its holds the pipe open.
    """

    def __init__(self, name: str, pid: int, recorder: int, pipe: int) -> None:
        self.name = name
        self._pid = pid
        self.recorder = os.open(f"/proc/{pid}/fd/{recorder}", os.O_RDONLY)
        self.pipe = os.open(f"/proc/{pid}/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK)
        self.descriptor: int | None = None
        try:
            self.descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError):
            pass

    def is_told_by(self, descriptor: int | None) -> bool:
        """Whether its end is what a descriptor became ready for; without a pidfd it is looked at, too."""
        if descriptor is not None and descriptor in (self.pipe, self.descriptor):
            return True
        return self.descriptor is None and state_of(self._pid) in ("", "Z", "X")

    def last_words(self) -> bytes:
        """What it left to be read: `DONE`, `TOLD` or nothing."""
        return os.pread(self.recorder, WORDS.stop, 0).rstrip(b"\0")

    def kill(self) -> None:
        """End it; the descriptor cannot mean another process that got the same number."""
        try:
            if self.descriptor is None:
                os.kill(self._pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
        except ProcessLookupError:
            pass


class _Launcher:
    """The process of an MPI launcher that a rank was started by, where there is one that can be ended."""

    def __init__(self, pid: int) -> None:
        self._descriptor: int | None = None
        while pid > 1:
            try:
                with open(f"/proc/{pid}/stat") as file:
                    name, _, rest = file.read().partition("(")[2].rpartition(")")
                if name in _LAUNCHERS:
                    self._descriptor = os.pidfd_open(pid)
                    return
                pid = int(rest.split()[1])
            except (AttributeError, OSError):
                return

    def end(self) -> None:
        """Wait for it to end by itself, then ask it, then end it; its exit code tells of the failure."""
        if self._descriptor is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            if select.select([self._descriptor], [], [], _LAUNCHER_GRACE_S)[0]:
                return
            try:
                signal.pidfd_send_signal(self._descriptor, number)
            except OSError:
                return


class _Waiter:
    """Waits for descriptors and tells the one that was ready first.

    A launcher ends the others within milliseconds of a death; epoll keeps the order.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._descriptors: list[int] = []

    def add(self, descriptor: int) -> None:
        """Wait for one more."""
        self._descriptors.append(descriptor)
        if self._epoll is not None:
            self._epoll.register(descriptor, select.EPOLLIN)

    def remove(self, descriptor: int) -> None:
        """Wait for one less."""
        self._descriptors.remove(descriptor)
        if self._epoll is not None:
            self._epoll.unregister(descriptor)

    def first(self, timeout_s: float | None) -> int | None:
        """Return the descriptor that was ready first, None after the timeout."""
        if self._epoll is not None:
            ready = [fd for fd, _ in self._epoll.poll(timeout_s, 1)]
        else:
            ready = select.select(self._descriptors, [], [], timeout_s)[0]
        return ready[0] if ready else None


def _guard(ranks: list[_Rank], templates: list[str], commands: int) -> bool:
    """Return whether the run ended in order, and not because no rank is left."""
    deadline: float | None = None
    waiter = _Waiter()
    waiter.add(commands)
    for rank in ranks:
        waiter.add(rank.pipe)
        if rank.descriptor is not None:
            waiter.add(rank.descriptor)
    blind = any(rank.descriptor is None for rank in ranks)
    while ranks:
        first = waiter.first(_POLL_S if blind or deadline is not None else None)
        if first == commands:
            if os.read(commands, 1):
                return True
            waiter.remove(commands)
        ended = [rank for rank in ranks if rank.is_told_by(first)]
        for rank in ended:
            ranks.remove(rank)
            waiter.remove(rank.pipe)
            if rank.descriptor is not None:
                waiter.remove(rank.descriptor)
        failed = [rank for rank in ended if rank.last_words() != DONE]
        died = [rank for rank in failed if rank.last_words() != TOLD]
        if died and deadline is None:
            _say(died, ranks, templates)
        if failed:
            grace_s = _DIED_GRACE_S if died else _TOLD_GRACE_S
            deadline = min(deadline or float("inf"), time.monotonic() + grace_s)
        if deadline is not None and time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
    return False


def _say(died: list[_Rank], left: list[_Rank], templates: list[str]) -> None:
    names = ", ".join(f"{rank.name} died{instruction_at(rank.recorder, templates)}" for rank in died)
    others = ", ".join(rank.name for rank in left)
    ending = f"; ending {others}" if others else ""
    os.write(2, f"pdmpi: error: {names}{ending}\n".encode())


def main() -> None:
    """Read who is to be watched from stdin, and watch."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    ranks = []
    watched, templates = json.loads(line)
    for name, pid, recorder, pipe in watched:
        try:
            ranks.append(_Rank(name, pid, recorder, pipe))
        except OSError:
            continue  # the system hides it from us, so it cannot be watched
    launcher = _Launcher(os.getppid())
    os.write(1, b"r")
    if not _guard(ranks, templates, commands=0):
        os.close(2)  # a launcher ends when its ranks' stderr does, which this process shares
        launcher.end()


if __name__ == "__main__":
    main()
