"""Which messages may take their links now, while others that want the same links are still to come.

Messages take a link in the order in which they become ready.  When all ranks are blocked, a
rank makes no further post before its wait is over and it has done the work up to that post;
a message that is ready before any rank at its links can be that far has nobody ahead of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdmpi.simulate.events import EventGraph
from pdmpi.simulate.matching import NEVER, Ints

__all__ = ["Lookahead"]

_UNKNOWN = -1
_FOREVER = np.iinfo(np.int64).max


class Lookahead:
    """Bounds on what is still to come, from the structure of a program.

    Parameters
    ----------
    graph
        The program.
    """

    def __init__(self, graph: EventGraph) -> None:
        self._graph = graph
        self._over = np.full(len(graph.duration), _UNKNOWN, np.int64)
        posts = np.flatnonzero(np.diff(graph.first_post))
        self._until_post = graph.length.copy()
        self._until_post[posts] = graph.post_offset[graph.first_post[posts]]
        pairs = {
            (int(link), rank)
            for stream, numbers in graph.messages.items()
            if len(numbers)
            for link in graph.links[numbers.start]
            for rank in (stream.source, stream.target)
            if link < graph.num_links
        }
        ordered = np.array(sorted(pairs), np.int64).reshape(-1, 2)
        self._ranks = ordered[:, 1]
        self._first_rank = np.searchsorted(ordered[:, 0], np.arange(graph.num_links))

    def unopposed(self, pending: Ints, ready: Ints, end: Ints, segments: Ints) -> NDArray[np.bool_]:
        """Return which pending messages may take their links.

        Parameters
        ----------
        pending
            Messages in the order in which they became ready; at least one.
        ready, end
            When each became ready, and the soonest that it can be over.
        segments
            The segment that each rank comes to next; all ranks are blocked.
        """
        bound = self._next_message(pending, end, segments)
        links = self._graph.links[pending]
        able = ready < bound[links].min(axis=1)
        able[0] = True
        place = np.arange(len(pending))
        while True:
            late = np.flatnonzero(~able)[::-1]
            first_late = np.full(self._graph.num_links + 1, len(pending))
            # Of several writes to one element the last one stays: here that of the first message.
            first_late[links[late, 0]] = late
            first_late[links[late, 1]] = late
            unopposed: NDArray[np.bool_] = able & (place < first_late[links].min(axis=1))
            if np.array_equal(able, unopposed):
                return unopposed
            able = unopposed

    def _next_message(self, pending: Ints, end: Ints, segments: Ints) -> Ints:
        """Return the soonest that a message not yet pending can become ready on each link."""
        graph = self._graph
        awaited = graph.waits_for[segments]
        self._over[pending] = end
        over = self._over[awaited]
        self._over[pending] = _UNKNOWN
        # Whatever is not pending needs a post that some rank makes after the first of these is over.
        soonest = np.where(over >= 0, over, end.min() + graph.duration[awaited]) + self._until_post[segments]
        soonest[awaited == NEVER] = _FOREVER
        return np.append(np.minimum.reduceat(soonest[self._ranks], self._first_rank), _FOREVER)
