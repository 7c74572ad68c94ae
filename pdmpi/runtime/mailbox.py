"""The transfers of one rank, bound once to their regions and started again and again."""

from __future__ import annotations

from collections.abc import Mapping

from pdmpi.runtime.boundary import Boundary
from pdmpi.runtime.slots import Region
from pdmpi.schedule.program import Channel
from pdmpi.transport.base import Bound, Transport

__all__ = ["Mailbox"]

_Key = tuple[Channel, int, int]


class Mailbox:
    """Regions and bound transfers of a rank, by channel, slot and peer.

    Parameters
    ----------
    transport
        Moves the bytes.
    boundaries
        Of the rank's stages, by stage.
    """

    def __init__(self, transport: Transport, boundaries: Mapping[int, Boundary]) -> None:
        self._transport = transport
        self._boundaries = boundaries
        self._receives: dict[_Key, Bound] = {}
        self._sends: dict[_Key, Bound] = {}

    def incoming(self, channel: Channel, slot: int) -> Region:
        """Return the region that a channel is received into."""
        return self._boundaries[channel.target_stage].incoming(channel)[slot]

    def receive(self, channel: Channel, slot: int, peer: int) -> Bound:
        """Return the transfer that receives from a peer into a slot."""
        key = (channel, slot, peer)
        if key not in self._receives:
            buffer = self.incoming(channel, slot).bytes
            tag = _tag(channel)
            self._receives[key] = self._transport.bind_recv(buffer, peer, tag, channel.kind)
        return self._receives[key]

    def send(self, channel: Channel, slot: int, peer: int) -> Bound:
        """Return the transfer that sends a slot to a peer."""
        key = (channel, slot, peer)
        if key not in self._sends:
            buffer = self._boundaries[channel.source_stage].outgoing(channel)[slot].bytes
            tag = _tag(channel)
            self._sends[key] = self._transport.bind_send(buffer, peer, tag, channel.kind)
        return self._sends[key]


def _tag(channel: Channel) -> int:
    """Number the pairs of stages without gaps: the same in every program of a run."""
    low, high = sorted((channel.source_stage, channel.target_stage))
    return high * (high - 1) // 2 + low
