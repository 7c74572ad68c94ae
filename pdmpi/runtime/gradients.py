"""Sums of a replicated stage's gradients, in buckets that leave while the backward still runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pdmpi.runtime.slots import Allocate
from pdmpi.simulate.costs import BUCKET_BYTES, DEVICE_BUCKET_BYTES
from pdmpi.transport.base import Request, Transport

__all__ = ["GradientReducer"]

_ALIGNMENT = 8
"""Elements that gradients in a bucket begin at multiples of, so that kernels read them in wide words."""


class _Bucket:
    """Gradients of one dtype that travel together, in one contiguous buffer."""

    def __init__(self, members: Sequence[nn.Parameter], allocate: Allocate) -> None:
        self.members = members
        first = members[0]
        rooms = [-(-p.numel() // _ALIGNMENT) * _ALIGNMENT for p in members]
        count = sum(rooms)
        memory, self.bytes = allocate((count + len(members)) * first.element_size())
        self.flat = memory.view(first.dtype)
        self.present = self.flat[count:]
        """One for each member that has a gradient: summed with them, the number of replicas that have one."""
        self.views: dict[nn.Parameter, Tensor] = {}
        offset = 0
        for parameter, room in zip(members, rooms, strict=True):
            self.views[parameter] = self.flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += room
        self.dtype = str(first.dtype).removeprefix("torch.")
        self.missing = set(members)
        """Members whose gradients are not known to be finished."""
        self.without: list[int] = []
        """Members that this replica's backward left without a gradient."""

    def fill(self) -> None:
        """Take all members' gradients, in few kernels."""
        gradients = {p: p.grad for p in self.members if p.grad is not None}
        self.without = [i for i, p in enumerate(self.members) if p not in gradients]
        with torch.no_grad():
            self.present.fill_(1.0)  # from no memory of the host
            for i in self.without:
                self.present[i].zero_()
                self.views[self.members[i]].zero_()
            if gradients:
                torch._foreach_copy_([self.views[p] for p in gradients], list(gradients.values()))


def _fill(parameters: Sequence[nn.Parameter], limit: int, allocate: Allocate) -> list[_Bucket]:
    """Group parameters in reverse order, the order in which a backward finishes their gradients."""
    groups: list[list[nn.Parameter]] = []
    for parameter in reversed(parameters):
        last = groups[-1] if groups else []
        nbytes = sum(p.numel() * p.element_size() for p in last)
        if not last or last[0].dtype != parameter.dtype or nbytes >= limit:
            groups.append([])
        groups[-1].append(parameter)
    return [_Bucket(members, allocate) for members in groups]


class GradientReducer:
    """Sums gradients over the replicas of a stage.

    Buckets are posted strictly in one order on every replica, whatever order gradients
    appear in, so that sums match.  A parameter that a backward left without gradient counts
    as zero, and keeps none if no replica has any, as in one process.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        transport: Transport,
        ranks: Sequence[int],
        allocate: Allocate,
    ) -> None:
        limit = DEVICE_BUCKET_BYTES if transport.sums_on_device else BUCKET_BYTES
        self._buckets = _fill(list(parameters.values()), limit, allocate)
        self._sums = [transport.bind_allreduce(b.bytes, b.dtype, ranks) for b in self._buckets]
        self._armed = False
        self._requests: list[Request] = []
        for bucket in self._buckets:
            for parameter in bucket.members:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))  # type: ignore[no-untyped-call]

    def arm(self) -> None:
        """Let buckets leave as the next backward finishes their gradients."""
        self._armed = True

    def reset(self) -> None:
        """Be ready for the next backward, however this one ended."""
        self._requests.clear()
        self._armed = False
        for bucket in self._buckets:
            bucket.without = []
            bucket.missing.update(bucket.members)

    def wait(self) -> None:
        """Post what is left, wait for all sums and make them the parameters' gradients."""
        for bucket in self._buckets:
            bucket.missing.clear()
        self._post_ready()
        for request in self._requests:
            request.wait()
        for bucket in self._buckets:
            present = bucket.present.tolist() if bucket.without else None
            for i, (parameter, view) in enumerate(bucket.views.items()):
                unused = present is not None and i in bucket.without and not present[i]
                parameter.grad = None if unused else view
        self.reset()

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        """Return what a finished gradient calls.

        It refers to nothing that refers to its parameter: through a tensor's hooks Python finds no cycle.
        """
        own_reducer, own_bucket = weakref.ref(self), weakref.ref(bucket)

        def ready(parameter: Tensor) -> None:
            reducer, filled = own_reducer(), own_bucket()
            if reducer is not None and filled is not None and reducer._armed:
                assert isinstance(parameter, nn.Parameter)
                filled.missing.discard(parameter)
                reducer._post_ready()

        return ready

    def _post_ready(self) -> None:
        for bucket in self._buckets[len(self._requests) :]:
            if bucket.missing:
                return
            bucket.fill()
            self._requests.append(self._sums[len(self._requests)].post())
