"""How many microbatches a replica holds between their forward and their backward."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["in_flight_depth"]


def in_flight_depth(replicas: Sequence[int], extra_in_flight: int = 0) -> tuple[int, ...]:
    """Return each stage's in-flight depth: warm-up + 1, and the most weight versions a replica holds.

    Parameters
    ----------
    replicas
        Replicas of each stage, R[s].
    extra_in_flight
        More minibatches in flight than the pipeline is deep, to hide transfers; shared by a
        stage's replicas.  The last stage holds none of them.

    Returns
    -------
    tuple of int
        ``ceil((sum(R[s:]) + extra) / R[s])``, per replica.  Without extra ones, PipeDream calls
        it NOAM at the input stage (Harlap et al. 2018, section 3.3).
    """
    after, depths = 0, []
    for stage in reversed(range(len(replicas))):
        extra = extra_in_flight if after else 0
        after += replicas[stage]
        depths.append(-(-(after + extra) // replicas[stage]))
    return tuple(reversed(depths))
