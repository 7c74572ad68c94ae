"""How many microbatches, and how many weight versions, a replica holds between forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["in_flight_depth", "synchronised_versions"]


def in_flight_depth(replicas: Sequence[int], extra_in_flight: int = 0) -> tuple[int, ...]:
    """Return each stage's in-flight depth: warm-up + 1, and the most weight versions a replica holds.

    Parameters
    ----------
    replicas
        Replicas of each stage, R[s].
    extra_in_flight
        More minibatches in flight at the input stage than the pipeline is deep, to hide
        transfers.  They taper off evenly to none at the last stage, since what hides the transfers
        of a boundary is how much deeper the stage before it is than the one behind.

    Returns
    -------
    tuple of int
        ``ceil((sum(R[s:]) + extra[s]) / R[s])``, per replica, where ``extra[s]`` is the share
        ``sum(R[s + 1:]) / sum(R[1:])`` of ``extra_in_flight``, rounded up.  Without extra
        ones, PipeDream calls it NOAM at the input stage (Harlap et al. 2018, section 3.3).
    """
    behind, after, depths = sum(replicas[1:]), 0, []
    for count in reversed(replicas):
        extra = -(-extra_in_flight * after // behind) if behind else 0
        after += count
        depths.append(-(-(after + extra) // count))
    return tuple(reversed(depths))


def synchronised_versions(replicas: Sequence[int], extra_in_flight: int = 0) -> tuple[int, ...]:
    """Return the most weight versions that a replica of each stage holds under vertical sync.

    Minibatch k uses, at every stage, the newest version that includes no more minibatches
    than the input stage's did when k entered, ``(floor(k / R[0]) - depth + 1) R[0]`` of them.
    So a stage keeps the versions of up to ``depth R[0] - gcd(R[0], R[s])`` minibatches, R[s] a
    version, beside the newest: as many as the input stage where R[s] = R[0].
    """
    entered = in_flight_depth(replicas, extra_in_flight)[0] * replicas[0]
    return tuple(1 - (math.gcd(replicas[0], count) - entered) // count for count in replicas)
