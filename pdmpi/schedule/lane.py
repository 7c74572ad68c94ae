"""One replica of one stage in a rank's order: positions, weight versions and slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pdmpi.schedule.order import Actions, Order
from pdmpi.schedule.program import Channel, Kind, Op, SlotCounts
from pdmpi.schedule.slots import Allocation, Positions, allocate

__all__ = ["Lane", "Link", "Recompute"]

Recompute = Literal["never", "except-last", "always"]


@dataclass(frozen=True, slots=True)
class Link:
    """A channel and its index in the program."""

    index: int
    channel: Channel


class Lane:
    """Positions of one replica's computations, and what follows from them.

    Arrays have one entry for each microbatch of the replica, in the order of the forwards.
    A position is an index into the rank's order.

    Attributes
    ----------
    microbatch, forward, backward, last_use
        Number; positions of its forward, of the backward that makes its gradients for
        earlier stages, and of the last computation that needs what it saved.
    recomputed
        Whether its activations are made again before the backward.
    version
        Weight version that it uses.
    window_end, window_last
        For each update: position of the last computation before it, and its last microbatch.
    sent
        Position before which its output slot must have been sent.
    input, output, saved, grad_in, grad_out
        Slots; an output, gradient or saved slot is ``None`` where the stage has none.
    """

    def __init__(
        self, order: Order, stage: int, acts: Actions, links: tuple[Link, ...], recompute: Recompute
    ) -> None:
        self.stage = stage
        self.incoming = tuple(link for link in links if link.channel.target_stage == stage)
        self.outgoing = tuple(link for link in links if link.channel.source_stage == stage)
        self.num_actions = len(acts)
        self._topology = order.topology
        self._acts = acts
        self._replicas = len(order.topology.ranks[stage])
        self._find_positions()
        self._choose_recomputation(recompute)
        self._number_updates(order)
        self._allocate_slots()

    def _find_positions(self) -> None:
        position = np.flatnonzero(self._acts[:, 1] == self.stage)
        op = self._acts[position, 0]
        self.forward: Positions = position[op == Op.FORWARD]
        self.microbatch: Positions = self._acts[self.forward, 2].astype(np.int64)
        weight = position[op == Op.BACKWARD_WEIGHT]
        self.split = len(weight) > 0
        back = position[op == (Op.BACKWARD_INPUT if self.split else Op.BACKWARD)]
        self.trained = len(back) > 0
        self.backward = self._by_forward(back) if self.trained else self.forward
        self.last_use = self._by_forward(weight) if self.split else self.backward

    def _by_forward(self, position: Positions) -> Positions:
        """Bring one position for each microbatch into the order of the forwards."""
        by_number = np.empty(int(self.microbatch.max()) // self._replicas + 1, np.int64)
        by_number[self._acts[position, 2] // self._replicas] = position
        found: Positions = by_number[self.microbatch // self._replicas]
        return found

    def _choose_recomputation(self, recompute: Recompute) -> None:
        self.recomputed: NDArray[np.bool_] = np.full(len(self.forward), self.trained and recompute != "never")
        if recompute == "except-last":
            self.recomputed &= self.backward != self.forward + 1

    def _number_updates(self, order: Order) -> None:
        per_update = order.microbatches_per_update[self.stage]
        ends = np.sort(self.last_use)
        window = per_update // self._replicas if per_update else len(ends) + 1
        self.window_end: Positions = ends[window - 1 :: window]
        self.window_last: Positions = np.arange(1, len(self.window_end) + 1) * per_update - 1
        newest = np.searchsorted(self.window_end, self.forward)
        self.version: Positions = (
            newest if order.versions is None else order.versions(self.stage, self.microbatch)
        )
        assert (self.version <= newest).all(), "a microbatch uses a version that is not made yet"
        self.num_weights = self._weight_slots(len(ends))

    def _weight_slots(self, num: int) -> int:
        """Return the length of the ring that keeps every version until its last use."""
        by_end = np.argsort(self.last_use, kind="stable")
        oldest = np.full(num + 1, len(self.window_end))
        oldest[:num] = np.minimum.accumulate(self.version[by_end][::-1])[::-1]
        made = np.arange(1, len(self.window_end) + 1)
        later = np.searchsorted(self.last_use[by_end], self.window_end, side="right")
        return int((made - oldest[later]).max(initial=0)) + 1

    def _allocate_slots(self) -> None:
        receives = any(link.channel.kind == Kind.ACTIVATION for link in self.incoming)
        sends = any(link.channel.kind == Kind.ACTIVATION for link in self.outgoing)
        least = 0 if self.trained else self._streamed()
        self.input = allocate(self.forward, self.last_use, least=least, ahead=receives, restarts=self.trained)
        restarts = self.input.restarts  # all or none: slots that repeat at different times make more sets
        self.output = allocate(self.forward, self.backward, least=least, restarts=restarts) if sends else None
        self.sent = self.backward if self.trained else self._reused()
        self.saved: Allocation | None = None
        self.grad_in: Allocation | None = None
        self.grad_out: Allocation | None = None
        if self.trained:
            begin = np.where(self.recomputed, self.backward, self.forward)
            self.saved = allocate(begin, self.last_use, restarts=restarts)
            if any(link.channel.kind == Kind.GRADIENT for link in self.incoming):
                waiting = self._gradients_waiting()
                self.grad_in = allocate(self.backward, self.backward, least=waiting, ahead=True)
            if any(link.channel.kind == Kind.GRADIENT for link in self.outgoing):
                self.grad_out = allocate(self.backward, self.backward, least=2)

    def _streamed(self) -> int:
        """Return the input and output slots of a stage whose microbatches only pass through."""
        spans = [link.channel.target_stage - link.channel.source_stage for link in self.outgoing]
        others = len(np.unique(self._acts[:, 1])) > 1
        return 1 + max([1, *spans, self._topology.num_ranks if others else 0])

    def _reused(self) -> Positions:
        """Return where each output slot is filled again, or the end."""
        count = self.output.count if self.output else len(self.forward)
        again = np.full(len(self.forward), self.num_actions)
        again[: len(self.forward) - count] = self.forward[count:]
        return again

    def _gradients_waiting(self) -> int:
        """Return the slots that gradients need which are made long before they are used.

        A source waits for the send of one gradient before it posts the next, so the receive
        must be posted by then.  Over an edge that skips stages the gradients of all
        microbatches in flight may be under way; on one rank, order says how many are.
        """
        own = np.sort(self.backward)
        needed = 0
        for link in self.incoming:
            if link.channel.kind != Kind.GRADIENT:
                continue
            source = self._acts[:, 1] == link.channel.source_stage
            if link.channel.source_stage - self.stage > 1:
                needed = max(needed, allocate(self.forward, self.backward).count)
            elif source.any():
                makes = (self._acts[:, 0] == Op.BACKWARD) | (self._acts[:, 0] == Op.BACKWARD_INPUT)
                next_made = np.flatnonzero(source & makes)[1:]
                behind = np.arange(1, len(next_made) + 1) - np.searchsorted(own, next_made)
                needed = max(needed, int(behind.max(initial=0)))
        return needed

    @property
    def slots(self) -> SlotCounts:
        """Slots of each sort."""
        return SlotCounts(
            weights=self.num_weights,
            input=self.input.count,
            output=_count(self.output),
            saved=_count(self.saved),
            grad_in=_count(self.grad_in),
            grad_out=_count(self.grad_out),
        )


def _count(slots: Allocation | None) -> int:
    return slots.count if slots else 0
