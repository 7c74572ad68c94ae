"""One stage of a model: a module that maps the values at its front to the values at its back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pdmpi.errors import InputError
from pdmpi.graph import Ref
from pdmpi.model.generator import Draw, run_seeded
from pdmpi.model.steps import Steps

__all__ = ["StageModule"]


class StageModule(nn.Module):
    """The layers of one stage, with parameters and buffers under the model's own names.

    Made by `pdmpi.model.build.build_stage`.

    Attributes
    ----------
    inputs
        Values that `forward` takes; the model's inputs at the stage that holds their layers.
    outputs
        Values that it returns: those that other stages read, and at the last stage those
        that the model returns.
    """

    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["inputs"] = ()
        self.__dict__["outputs"] = ()
        self.__dict__["_steps"] = None
        self.__dict__["_always_evaluating"] = []
        self.__dict__["_draw"] = run_seeded

    def adopt(self, steps: Steps, changed_buffers: Sequence[str]) -> None:
        """Take the calls that the stage makes, once its modules are in place.

        ``changed_buffers`` are those that a second run of the same microbatch would change again.
        """
        self.__dict__["_changed_buffers"] = tuple(changed_buffers)
        self.__dict__["inputs"] = steps.inputs
        self.__dict__["outputs"] = steps.outputs
        self.__dict__["_steps"] = steps
        kept = [module for module in self.modules() if module is not self and not module.training]
        self.__dict__["_always_evaluating"] = kept

    @contextmanager
    def drawing(self, draw: Draw) -> Iterator[None]:
        """Let random numbers be drawn another way meanwhile."""
        self.__dict__["_draw"] = draw
        try:
            yield
        finally:
            self.__dict__["_draw"] = run_seeded

    def seeds(self, microbatch: int) -> dict[str, int]:
        """Return the seed of each call of a training microbatch that draws random numbers, by its key."""
        steps: Steps = self.__dict__["_steps"]
        return steps.seeds(microbatch)

    def train(self, mode: bool = True) -> StageModule:
        """Set the mode, except of what the model's own ``train`` keeps in evaluation (frozen BatchNorm)."""
        super().train(mode)
        for module in self.__dict__["_always_evaluating"]:
            module.training = False
        return self

    def forward(
        self, values: Mapping[Ref, Tensor], microbatch: int, recompute: bool = False
    ) -> dict[Ref, Tensor]:
        """Run the stage on one microbatch.

        Parameters
        ----------
        values
            The tensors named by `inputs`; they are never written to.
        microbatch
            Its number; random masks depend on it, on the seed and on the layer's name only.
        recompute
            Whether this repeats a forward that was run before; BatchNorm then leaves its
            running statistics alone.

        Returns
        -------
        dict
            The tensors named by `outputs`, contiguous.

        Raises
        ------
        InputError
            For a second run of layers (spectral norm) that must not run twice.
        """
        steps: Steps = self.__dict__["_steps"]
        draw: Draw = self.__dict__["_draw"]
        if not recompute:
            return steps.run(values, microbatch, self.training, draw)
        if self.__dict__["_changed_buffers"]:
            names = ", ".join(self.__dict__["_changed_buffers"])
            raise InputError(
                f"the forward changes the buffers {names}, which recomputation would change twice; "
                '[schedule] recompute = "never" (or keep these layers out of recomputed stages)'
            )
        tracking = [m for m in self.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        for module in tracking:
            module.track_running_stats = False
        try:
            return steps.run(values, microbatch, self.training, draw)
        finally:
            for module in tracking:
                module.track_running_stats = True
