"""Lowering: from the order of computations to the program that a rank runs.

Each instruction gets a place beside a computation (`Place`), and the places are sorted::

    wait for the activation's send | recompute | wait for receives | post the reduction
    wait for the other replicas, where they normalise together
    computation
    wait for the last gradient's send | post sends | post receives into freed slots
    wait for the reduction | sum over all stages | update

Receives are posted as soon as their slot falls free, sends are waited for as late as
their slot allows: that hides transfers and lets no rendezvous block a rank.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

import numpy as np

from pdmpi.schedule.lane import Lane, Link, Recompute
from pdmpi.schedule.listing import Listing, Place
from pdmpi.schedule.order import Order
from pdmpi.schedule.program import (
    ALL_STAGES,
    NO_SLOT,
    Channel,
    Group,
    Kind,
    Op,
    Program,
    SlotCounts,
    Topology,
)
from pdmpi.schedule.slots import Allocation, Positions

__all__ = ["lower"]


def lower(
    order: Order,
    recompute: Recompute = "never",
    recompute_stages: Collection[int] = (),
    *,
    joint_updates: bool = False,
    joint_statistics: Collection[int] = (),
) -> Program:
    """Return the program that runs an order.

    Parameters
    ----------
    order
        Of every rank's forwards and backwards.
    recompute
        Whether activations are kept from forward to backward (``never``) or made again from
        the input (``always``); ``except-last`` keeps them where the backward follows its
        forward at once, as that of GPipe's last microbatch does.
    recompute_stages
        Stages that recompute always, whatever ``recompute`` says.
    joint_updates
        Whether every update waits for a sum over all ranks, which each rank joins when the
        gradients of all its stages are final.  Only for orders that flush.
    joint_statistics
        Stages whose replicas, if there are several, run each forward and backward together.
    """
    topology = order.topology
    links = tuple(Link(i, channel) for i, channel in enumerate(channels_of(topology)))
    reduced = [s for s, r in enumerate(topology.ranks) if len(r) > 1 and order.microbatches_per_update[s]]
    groups = {s: index for index, s in enumerate(reduced)}
    sums = tuple(Group(s, topology.ranks[s]) for s in reduced)
    if joint_updates:
        assert len(set(order.microbatches_per_update)) == 1, "stages that update together update alike"
        sums += (Group(ALL_STAGES, tuple(range(topology.num_ranks))),)
    together = [s for s in sorted(joint_statistics) if len(topology.ranks[s]) > 1]
    meetings = {s: index for index, s in enumerate(together, start=len(sums))}
    sums += tuple(Group(s, topology.ranks[s], statistics=True) for s in together)
    slots = [SlotCounts(weights=0)] * topology.num_stages
    rows = []
    for acts in order.actions:
        listing = Listing()
        lanes = [
            Lane(order, stage, acts, links, "always" if stage in recompute_stages else recompute)
            for stage in np.unique(acts[:, 1]).tolist()
        ]
        final = np.max([lane.window_end for lane in lanes], axis=0) if joint_updates else None
        for lane in lanes:
            _write(lane, topology, groups.get(lane.stage, NO_SLOT), final, listing)
            if lane.stage in meetings:
                _write_meetings(lane, meetings[lane.stage], len(topology.ranks[lane.stage]), listing)
            slots[lane.stage] = _most(slots[lane.stage], lane.slots)
        if final is not None:
            _write_joint_sum(lanes[0], final, len(reduced), listing)
        rows.append(listing.rows())
    return Program(
        schedule=order.schedule,
        topology=topology,
        num_microbatches=order.num_microbatches,
        microbatches_per_update=order.microbatches_per_update,
        channels=tuple(link.channel for link in links),
        groups=sums,
        slots=tuple(slots),
        rows=tuple(rows),
    )


def channels_of(topology: Topology) -> tuple[Channel, ...]:
    """Return a channel for the activations of each edge, then for the gradients of each that has any."""
    forth = [Channel(Kind.ACTIVATION, source, target) for source, target in topology.edges]
    back = [Channel(Kind.GRADIENT, t, s) for s, t in topology.edges if (s, t) not in topology.no_gradient]
    return (*forth, *back)


def _most(a: SlotCounts, b: SlotCounts) -> SlotCounts:
    return SlotCounts(**{f.name: max(getattr(a, f.name), getattr(b, f.name)) for f in fields(SlotCounts)})


def _write(lane: Lane, topology: Topology, group: int, updated: Positions | None, listing: Listing) -> None:
    _write_computations(lane, listing)
    for link in lane.incoming:
        _write_receives(lane, link, topology, listing)
    for link in lane.outgoing:
        _write_sends(lane, link, topology, listing)
    if len(lane.window_end):
        _write_updates(lane, group, lane.window_end if updated is None else updated, listing)


def _write_computations(lane: Lane, listing: Listing) -> None:
    k, version, weights = lane.microbatch, lane.version, lane.version % lane.num_weights
    saved = _slot(lane.saved)
    kept = np.where(lane.recomputed, NO_SLOT, saved)
    stage = lane.stage
    listing.add(
        lane.forward, Place.COMPUTE, Op.FORWARD, stage, k,
        version, weights, lane.input.slot, _slot(lane.output), kept,
    )  # fmt: skip
    if not lane.trained:
        return
    again = np.flatnonzero(lane.recomputed)
    if lane.saved and len(again):
        listing.add(
            lane.backward[again], Place.RECOMPUTE, Op.RECOMPUTE, stage, k[again],
            version[again], weights[again], lane.input.slot[again], lane.saved.slot[again],
        )  # fmt: skip
    listing.add(
        lane.backward, Place.COMPUTE, Op.BACKWARD_INPUT if lane.split else Op.BACKWARD, stage, k,
        version, weights, saved, _slot(lane.grad_in), _slot(lane.grad_out),
    )  # fmt: skip
    if lane.split:
        listing.add(lane.last_use, Place.COMPUTE, Op.BACKWARD_WEIGHT, stage, k, version, weights, saved)


def _write_receives(lane: Lane, link: Link, topology: Topology, listing: Listing) -> None:
    activation = link.channel.kind == Kind.ACTIVATION
    slots = lane.input if activation else lane.grad_in
    if slots is None:
        return
    needed = lane.forward if activation else lane.backward
    first = np.argsort(needed, kind="stable")
    k = lane.microbatch[first]
    operands = (link.index, _peers(topology, link.channel.source_stage, k), slots.slot[first])
    listing.add(slots.free_after[first], Place.RECEIVE, Op.POST_RECV, lane.stage, k, *operands)
    listing.add(needed[first], Place.RECEIVED, Op.WAIT_RECV, lane.stage, k, *operands)


def _write_sends(lane: Lane, link: Link, topology: Topology, listing: Listing) -> None:
    activation = link.channel.kind == Kind.ACTIVATION
    slots = lane.output if activation else lane.grad_out
    if slots is None:
        return
    k, peer = lane.microbatch, _peers(topology, link.channel.target_stage, lane.microbatch)
    operands = (link.index, peer, slots.slot)
    made = lane.forward if activation else lane.backward
    listing.add(made, Place.SEND, Op.POST_SEND, lane.stage, k, *operands)
    if activation:
        listing.add(lane.sent, Place.SENT, Op.WAIT_SEND, lane.stage, k, *operands)
    else:
        by_time = np.argsort(lane.backward, kind="stable")
        following = np.full(len(k), lane.num_actions)
        following[by_time[:-1]] = lane.backward[by_time[1:]]
        listing.add(following, Place.GRADIENT_SENT, Op.WAIT_SEND, lane.stage, k, *operands)


def _write_joint_sum(lane: Lane, final: Positions, group: int, listing: Listing) -> None:
    """Write the sums over all stages, each where the gradients of all the rank's stages are final."""
    for op in (Op.POST_REDUCE, Op.WAIT_REDUCE):
        listing.add(final, Place.JOINED, op, lane.stage, lane.window_last, group)


def _write_meetings(lane: Lane, group: int, replicas: int, listing: Listing) -> None:
    """Let the replicas wait for each other before the forwards and backwards of each turn."""
    last_of_turn = lane.microbatch - lane.microbatch % replicas + replicas - 1
    for at in (lane.forward, lane.backward) if lane.trained else (lane.forward,):
        for op in (Op.POST_REDUCE, Op.WAIT_REDUCE):
            listing.add(at, Place.TOGETHER, op, lane.stage, last_of_turn, group)


def _write_updates(lane: Lane, group: int, updated: Positions, listing: Listing) -> None:
    at, last = lane.window_end, lane.window_last
    if group != NO_SLOT:
        listing.add(at, Place.POST_REDUCE, Op.POST_REDUCE, lane.stage, last, group)
        listing.add(at, Place.REDUCED, Op.WAIT_REDUCE, lane.stage, last, group)
    version = np.arange(1, len(at) + 1)
    ring = lane.num_weights
    slots = ((version - 1) % ring, version % ring)
    listing.add(updated, Place.UPDATE, Op.UPDATE, lane.stage, last, version, *slots)


def _peers(topology: Topology, stage: int, microbatch: Positions) -> Positions:
    ranks = np.array(topology.ranks[stage])
    return ranks[microbatch % len(ranks)]


def _slot(slots: Allocation | None) -> int | Positions:
    return NO_SLOT if slots is None else slots.slot
