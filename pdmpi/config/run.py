"""The configuration of a run, as its TOML file has it.

A user's model, data and loss are named as ``"module:callable"`` and imported by nothing
but that name.  Every table below is one section of the file; unknown keys are refused
with the nearest known one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

__all__ = [
    "CheckpointConfig", "CollectivesConfig", "DataConfig", "Factory", "LossConfig", "ModelConfig",
    "OptimizerConfig", "OutputConfig", "RunConfig", "RuntimeConfig", "ScheduleConfig", "TrainConfig",
    "TransportConfig",
]  # fmt: skip

Factory = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""``"module:callable"``."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class ModelConfig(_Table):
    """``[model]``: what to train."""

    factory: Factory
    """Callable that returns the ``torch.nn.Module``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""
    leaves: tuple[str, ...] = Field(default=(), strict=False)
    """Patterns of submodule paths to keep as one layer each, e.g. ``["encoder.layers.*"]``."""


class DataConfig(_Table):
    """``[data]``: map-style datasets of (input, target) pairs."""

    factory: Factory
    """Callable that returns a dataset; called with ``split="train"`` or ``split="test"`` and ``args``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""


class LossConfig(_Table):
    """``[loss]``: called as ``loss(output, target)``; returns the mean over the microbatch."""

    factory: Factory = "torch.nn:CrossEntropyLoss"
    """Callable that returns the loss."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""


class GroupConfig(_Table):
    """``[[optimizer.groups]]``: parameters that are stepped otherwise (no weight decay, say)."""

    match: tuple[str, ...] = Field(min_length=1, strict=False)
    """Patterns of parameter names, e.g. ``["*.bias", "*norm*"]``; the first group that matches counts."""
    args: dict[str, Any]
    """Keyword arguments of the optimizer that differ for them."""


class LrSchedulerConfig(_Table):
    """``[[optimizer.lr_schedulers]]``: what the learning rate does; several take their turns."""

    name: str
    """Name of the class in ``torch.optim.lr_scheduler``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""
    length: int | None = Field(default=None, ge=1)
    """Minibatches (or epochs) of its turn; the last one has none and goes on to the end."""


class OptimizerConfig(_Table):
    """``[optimizer]``: any of ``torch.optim``."""

    name: str = "SGD"
    """Name of the class in ``torch.optim``."""
    args: dict[str, Any] = Field(default_factory=lambda: {"lr": 0.1})
    """Keyword arguments for it."""
    groups: tuple[GroupConfig, ...] = Field(default=(), strict=False)
    """Parameters with arguments of their own."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Norm that gradients are scaled down to: over all stages where all flush, else over each stage."""
    lr_schedulers: tuple[LrSchedulerConfig, ...] = Field(default=(), strict=False)
    """Schedulers of the learning rate, one after the other, each from the rates in ``args``."""
    lr_interval: Literal["minibatch", "epoch"] = "minibatch"
    """What they count.  An update goes by the first minibatch (or the epoch) that it averages."""


class ScheduleConfig(_Table):
    """``[schedule]``: how minibatches go through the pipeline."""

    name: str = "pipedream"
    """One of the schedules that ``pdmpi plan --help`` lists."""
    microbatches: int = Field(default=1, ge=1)
    """Microbatches that a minibatch is split into (schedules that flush or accumulate)."""
    extra_in_flight: int | Literal["auto"] = 0
    """Minibatches in flight beyond the pipeline's depth, to hide transfers."""
    recompute: Literal["never", "except-last", "always"] = "never"
    """Recompute activations in the backward instead of keeping them."""
    staleness_warmup: int = Field(default=0, ge=0)
    """Updates over which a stage's learning rate rises from lr / (its version lag + 1) to lr; 0 for none."""
    weight_prediction: bool = False
    """Run forwards at the weights that are expected when the gradient arrives (SGD with momentum)."""


class TrainConfig(_Table):
    """``[train]``: how long and how."""

    minibatch_size: int = Field(ge=1)
    """Samples that go through the pipeline as one minibatch."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the training set; either this or ``steps``."""
    steps: int | None = Field(default=None, ge=1)
    """Minibatches to train; either this or ``epochs``."""
    seed: int = Field(default=0, ge=0)
    """Seed of weights, data order and dropout."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Type of parameters and activations; in 16 bits the optimizer steps float32 masters.

    float16 has a dynamic loss scale, which all stages share, and so wants a schedule that flushes.
    """
    batch_norm: Literal["microbatch", "minibatch", "synchronised"] = "microbatch"
    """What moves running statistics: each microbatch, or each update by its whole minibatch (as in GPipe).

    Either way a microbatch is normalised by its own statistics.  ``synchronised`` normalises what the
    replicas of a stage run at the same time together, as SyncBatchNorm does, in schedules that flush.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; ``auto`` takes a GPU for each rank where there are any."""
    threads: int = Field(default=1, ge=1)
    """Intra-operator threads of each rank on a CPU."""
    evaluate_every: int = Field(default=1, ge=0)
    """Epochs between evaluation passes; 0 never evaluates."""


class TransportConfig(_Table):
    """``[transport]``: what moves tensors between ranks."""

    device: Literal["auto", "cuda", "host"] = "auto"
    """Whether MPI is given device memory; ``auto`` probes by sending."""
    share_devices: bool = False
    """Whether more ranks than GPUs may start on a host and take turns on them."""


class CollectivesConfig(_Table):
    """``[collectives]``: what sums the gradients of replicas on GPUs."""

    backend: Literal["auto", "nccl", "mpi"] = "auto"
    """NCCL, or MPI through host buffers; ``auto`` takes NCCL where each rank has a GPU of its own."""


class RuntimeConfig(_Table):
    """``[runtime]``: how ranks run their programs."""

    stall_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that a transfer of the program may take; then the job is ended.

    Where all ranks meet (start, checkpoint, end of a program) it is ten times as long, since one of them
    may be reading data or writing a file; with ``compile`` it always is, since stages compile one after
    the other.
    """
    silence_timeout_s: float = Field(default=7.0, gt=0)
    """Seconds without a sign of life of a rank (stopped, its host or link gone) until the job is ended."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Whether a GPU replays a stage's kernels as one launch; ``auto`` does where that can be."""
    compile: bool = False
    """Whether stages are trained through torch's compiler, equal to rounding; it takes minutes at a start."""


class CheckpointConfig(_Table):
    """``[checkpoint]``: when the run's state is kept, and when it stops to be requeued."""

    enabled: bool = True
    """Whether checkpoints are written at all."""
    every_minibatches: int = Field(default=500, ge=1)
    """Minibatches after which the pipeline is drained (it is at the end of an epoch, too).

    Only then a checkpoint is written, or a signal obeyed.  The drains are part of the run:
    with the same number an interrupted run equals one that was not.
    """
    every_s: float = Field(default=300.0, ge=0)
    """Seconds that must have passed since the last checkpoint for a drain to write the next."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints to keep."""
    signals: tuple[Literal["USR1", "USR2", "TERM", "INT", "HUP"], ...] = Field(
        default=("USR1", "USR2", "TERM"), strict=False
    )
    """Signals that checkpoint the run and end it with exit code 75."""
    margin_s: float = Field(default=60.0, ge=0)
    """Seconds before the batch job's time limit, beside the time of a checkpoint, at which it stops."""


class OutputConfig(_Table):
    """``[output]``: where results go."""

    run_dir: str = "runs"
    """Directory for metrics, checkpoints and status."""


class RunConfig(_Table):
    """A whole configuration file."""

    model: ModelConfig
    data: DataConfig
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig
    transport: TransportConfig = TransportConfig()
    collectives: CollectivesConfig = CollectivesConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    output: OutputConfig = OutputConfig()
