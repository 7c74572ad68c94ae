"""The rows of tools/bench/pipeline: which system trains which model, how, on how many GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pdmpi.config.load import parse_config
from pdmpi.config.run import RunConfig

SGD = {"lr": 1e-3, "momentum": 0.9}
SIZES = {"gpt": (4, 1), "vgg16": (64,), "resnet50": (128,)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run.

    Attributes
    ----------
    system
        ``pdmpi`` or ``torch``.
    model, size
        What is trained, and the rows of its microbatch.
    schedule, shape, microbatches
        ``auto`` and an empty shape for the planner's choice.
    graphs
        Whether pdmpi uses CUDA graphs.
    compiled
        Whether torch's compiler makes the kernels (``[runtime] compile``, or ``torch.compile`` of the peer).
    recompute
        Of pdmpi.
    depth, dropout
        Blocks of the GPT, and what they drop.
    """

    system: str
    model: str
    size: int
    schedule: str
    shape: tuple[int, ...] = ()
    microbatches: int = 1
    graphs: bool = True
    compiled: bool = False
    recompute: str = "never"
    depth: int = 24
    dropout: float = 0.0

    @property
    def num_ranks(self) -> int:
        return sum(self.shape)

    @property
    def name(self) -> str:
        shape = "-".join(map(str, self.shape)) or "planner's shape"
        parts = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        mode = "" if self.graphs or self.system != "pdmpi" else ", no graphs"
        mode += ", compiled" if self.compiled else ""
        mode += f", dropout {self.dropout}" if self.dropout else ""
        again = "" if self.recompute == "never" else ", recomputing"
        return f"{self.schedule} {shape}{parts}{mode}{again}"


def rows_of(model: str, ranks: int) -> Iterator[Row]:
    """Yield the rows of a model on so many GPUs, the most telling first."""
    straight = (1,) * ranks
    bases: list[dict[str, Any]] = [{"model": model, "size": size} for size in SIZES[model]]

    def both(ours: str, theirs: str, at: dict[str, Any], count: int) -> Iterator[Row]:
        yield Row(system="pdmpi", schedule=ours, shape=straight, microbatches=count, **at)
        yield Row(system="torch", schedule=theirs, shape=straight, microbatches=count, **at)

    for at in bases:
        if ranks == 1:
            yield Row(system="pdmpi", schedule="pipedream", shape=(1,), **at)
            yield Row(system="torch", schedule="one GPU", shape=(1,), **at)
            continue
        yield Row(system="pdmpi", schedule="pipedream", shape=straight, **at)
        yield Row(system="pdmpi", schedule="data-parallel", shape=(ranks,), **at)
        yield Row(system="torch", schedule="DistributedDataParallel", shape=(ranks,), **at)
        yield Row(system="pdmpi", schedule="auto", **at)
        for shape in ((2, 1, 1), (2, 2)) if ranks == 4 else ((4, 4), (2, 2, 2, 2)) if ranks == 8 else ():
            yield Row(system="pdmpi", schedule="pipedream", shape=shape, **at)
        if model == "gpt":
            yield from both("1f1b", "1F1B", at, 8)
            yield from both("gpipe", "GPipe", at, 8)
    if ranks == 1:
        ways: list[dict[str, Any]] = [{"compiled": True}]
        if model == "gpt":
            ways.append({"dropout": 0.1})
        for at in bases:
            for way in ways:
                yield Row(system="pdmpi", schedule="pipedream", shape=(1,), **way, **at)
                yield Row(system="torch", schedule="one GPU", shape=(1,), **way, **at)
        return
    if model != "gpt":
        return
    for at in bases:
        yield Row(system="pdmpi", schedule="pipedream", shape=straight, graphs=False, **at)
        for name in ("2bw", "zb-h1", "interleaved"):
            yield Row(system="pdmpi", schedule=name, shape=straight, microbatches=8, **at)
    for count in (32, 4, 16):
        for at in bases:
            yield from both("1f1b", "1F1B", at, count)
            yield from both("gpipe", "GPipe", at, count)
    for name in ("Interleaved1F1B", "ZBVZeroBubble"):
        for at in bases:
            yield Row(system="torch", schedule=name, shape=straight, microbatches=8, **at)


def config_of(row: Row, minibatches: int) -> RunConfig:
    """Return the configuration of a run; its epoch is so many minibatches."""
    if row.model == "gpt":
        arguments = {"depth": row.depth, "dropout": row.dropout}
        model = {"factory": "gpt_model:gpt", "args": arguments, "leaves": ["*"]}
        data = {"factory": "gpt_model:words"}
    else:
        name = {"vgg16": "vgg:vgg16", "resnet50": "resnet:resnet50"}[row.model]
        model, data = {"factory": f"pdmpi.model.zoo.{name}"}, {"factory": "gpt_model:pictures"}
    minibatch = row.size * row.microbatches
    data["args"] = {"samples": minibatch * minibatches}
    return parse_config({
        "model": model,
        "data": data,
        "loss": {"factory": "gpt_model:Scores"},
        "optimizer": {"name": "SGD", "args": SGD},
        "schedule": {
            "name": row.schedule, "microbatches": row.microbatches, "recompute": row.recompute,
            "extra_in_flight": "auto",
        },
        "train": {"minibatch_size": minibatch, "epochs": 1, "evaluate_every": 0, "dtype": "bfloat16"},
        "runtime": {"cuda_graphs": "auto" if row.graphs else False, "compile": row.compiled},
        "checkpoint": {"enabled": False, "every_minibatches": minibatches},
    })  # fmt: skip
