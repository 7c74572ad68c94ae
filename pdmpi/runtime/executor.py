"""Runs one rank's instructions of a checked program: in order, all of them, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from pdmpi.errors import PdmpiError
from pdmpi.runtime.clock import DeviceClock
from pdmpi.runtime.limit import JointLimit
from pdmpi.runtime.mailbox import Mailbox
from pdmpi.runtime.player import Player
from pdmpi.runtime.recorder import Recorder
from pdmpi.schedule.check import CheckedProgram
from pdmpi.schedule.program import ALL_STAGES, Instruction, Op, Program
from pdmpi.simulate.report import COMPUTE
from pdmpi.transport.base import Request

__all__ = ["Executor"]

_Handler = Callable[[int, int, int, int, int, int, int], None]


class Executor:
    """One rank of one program.

    Parameters
    ----------
    checked
        A program that the checker passed.
    rank
        The rank that is run.
    players
        The rank's stages, by stage.
    mailbox
        The rank's transfers.
    joint
        The rank's part in sums over all stages, where the program has any.
    on_microbatch
        Called with the microbatch after each backward (or forward, where nothing is trained)
        of the rank's first stage.
    settle
        Returns when the device has run all that was queued.
    recorder
        Is told which instruction is run.
    clock
        Tells when the device ran the computations; the host's clock does without it.
    """

    def __init__(
        self,
        checked: CheckedProgram,
        rank: int,
        players: Mapping[int, Player],
        mailbox: Mailbox,
        joint: JointLimit | None = None,
        on_microbatch: Callable[[int], None] | None = None,
        settle: Callable[[], None] = lambda: None,
        recorder: Recorder | None = None,
        clock: DeviceClock | None = None,
    ) -> None:
        self.program: Program = checked.program
        self._rank = rank
        self._players = players
        self._rows = self.program.rows[self._rank].tolist()
        self._versions = [_versions(self.program, c.source_stage) for c in self.program.channels]
        self._receives: dict[tuple[int, int], Request] = {}
        self._sends: dict[tuple[int, int], Request] = {}
        self._mailbox = mailbox
        self._joint = joint
        self._on_microbatch = on_microbatch
        self._settle = settle
        self._recorder = recorder
        self._clock = clock
        trains = any(row[0] in (Op.BACKWARD, Op.BACKWARD_INPUT) for row in self._rows)
        self._counted = (Op.BACKWARD, Op.BACKWARD_INPUT) if trains else (Op.FORWARD,)
        self._first = min(players)
        self.start_s: NDArray[np.float64] = np.zeros(len(self._rows))
        self.end_s: NDArray[np.float64] = np.zeros(len(self._rows))

    def run(self) -> None:
        """Run every instruction; the pipeline is drained and slot 0 holds the newest weights after it.

        Raises
        ------
        PdmpiError
            Naming rank, stage, instruction and cause, when one fails.
        """
        handlers = self._handlers()
        starts, ends = self.start_s, self.end_s
        i = 0
        at: MutableSequence[int] = [0]
        if self._recorder is not None:
            at = self._recorder.begin(self.program.rows[self._rank])
        if self._clock is not None:
            self._clock.begin()
        origin = perf_counter()
        try:
            for i, (op, stage, k, a, b, c, d, e) in enumerate(self._rows):
                at[0] = i
                starts[i] = perf_counter() - origin
                handlers[op](stage, k, a, b, c, d, e)
                ends[i] = perf_counter() - origin
                if op in self._counted and stage == self._first and self._on_microbatch is not None:
                    self._on_microbatch(k)
        except Exception as error:
            instruction = Instruction.from_row(self._rows[i])
            kind = type(error) if isinstance(error, PdmpiError) else PdmpiError
            where = "" if isinstance(error, PdmpiError) else " (PDMPI_DEBUG=1 shows where)"
            raise kind(
                f"rank {self._rank} (stage {instruction.stage}) failed in instruction {i}, "
                f"{instruction}: {type(error).__name__}: {error}{where}"
            ) from error
        self._settle()
        if self._recorder is not None:
            self._recorder.end()
        ends[-1:] = perf_counter() - origin
        if self._clock is not None:
            self._read(self._clock)
        for player in self._players.values():
            player.weights.rewind()

    def _handlers(self) -> list[_Handler]:
        table: dict[Op, _Handler] = {
            Op.POST_RECV: self._post_recv,
            Op.WAIT_RECV: self._wait_recv,
            Op.POST_SEND: self._post_send,
            Op.WAIT_SEND: self._wait_send,
            Op.FORWARD: lambda s, *operands: self._players[s].forward(*operands),
            Op.RECOMPUTE: lambda s, k, v, w, i, saved, _: self._players[s].recompute(k, v, w, i, saved),
            Op.BACKWARD: lambda s, *operands: self._players[s].backward(*operands),
            Op.BACKWARD_INPUT: lambda s, *operands: self._players[s].backward_input(*operands),
            Op.BACKWARD_WEIGHT: lambda s, k, v, w, saved, *_: self._players[s].backward_weight(k, w, saved),
            Op.POST_REDUCE: self._post_reduce,
            Op.WAIT_REDUCE: self._wait_reduce,
            Op.UPDATE: lambda s, k, v, read, write, *_: self._players[s].update(v, read, write),
        }
        if self._clock is not None:
            table.update({op: _marked(table[op], self._clock) for op in COMPUTE})
        return [table[op] for op in Op]

    def _read(self, clock: DeviceClock) -> None:
        """Put the device's times of computations in place of the host's."""
        computed = np.flatnonzero(np.isin(self.program.rows[self._rank][:, 0], COMPUTE))
        marks = np.array(clock.marks_s())
        self.start_s[computed], self.end_s[computed] = marks[::2], marks[1::2]

    def _post_reduce(self, stage: int, k: int, group: int, *_: int) -> None:
        if self.program.groups[group].stage == ALL_STAGES:
            assert self._joint is not None
            self._joint.post()
        elif self.program.groups[group].sums_gradients:
            self._players[stage].arm_reduce()

    def _wait_reduce(self, stage: int, k: int, group: int, *_: int) -> None:
        if self.program.groups[group].stage == ALL_STAGES:
            assert self._joint is not None
            self._joint.wait()
        elif self.program.groups[group].sums_gradients:
            self._players[stage].wait_reduce()

    def _post_recv(self, stage: int, k: int, channel: int, peer: int, slot: int, *_: int) -> None:
        bound = self._mailbox.receive(self.program.channels[channel], slot, peer)
        self._receives[channel, slot] = bound.post()

    def _wait_recv(self, stage: int, k: int, channel: int, peer: int, slot: int, *_: int) -> None:
        self._receives.pop((channel, slot)).wait()
        self._mailbox.incoming(self.program.channels[channel], slot).check(k, self._versions[channel][k])

    def _post_send(self, stage: int, k: int, channel: int, peer: int, slot: int, *_: int) -> None:
        bound = self._mailbox.send(self.program.channels[channel], slot, peer)
        self._sends[channel, slot] = bound.post()

    def _wait_send(self, stage: int, k: int, channel: int, peer: int, slot: int, *_: int) -> None:
        self._sends.pop((channel, slot)).wait()


def _versions(program: Program, stage: int) -> list[int]:
    """Return the weight version that a stage runs each microbatch with."""
    versions = np.zeros(program.num_microbatches, np.int64)
    for rank in program.topology.ranks[stage]:
        rows = program.rows[rank]
        forwards = rows[(rows[:, 0] == Op.FORWARD) & (rows[:, 1] == stage)]
        versions[forwards[:, 2]] = forwards[:, 3]
    return [int(version) for version in versions]


def _marked(handler: _Handler, clock: DeviceClock) -> _Handler:
    def handle(*operands: int) -> None:
        clock.mark()
        handler(*operands)
        clock.mark()

    return handle
