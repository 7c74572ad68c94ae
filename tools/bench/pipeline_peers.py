"""Runs the peers' rows of tools/bench/pipeline: torch.distributed, one process a GPU, on pdmpi's split."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "4")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from pipeline_pdmpi import brief
from pipeline_rows import SGD, Row, config_of
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel

from pdmpi.model.factory import load_factory
from pdmpi.plan.store import load_plan

WARM_UP = 3


def whole(row: Row) -> nn.Module:
    config = config_of(row, 1)
    torch.manual_seed(0)
    return load_factory(config.model.factory)(**config.model.args)


def batch_of(row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    config = config_of(row, 1)
    source, target = load_factory(config.data.factory)(split="train", **config.data.args).tensors
    source = source.to(torch.bfloat16) if source.is_floating_point() else source
    return source.pin_memory(), target.pin_memory()


def optimizer_of(modules: list[nn.Module]) -> torch.optim.Optimizer:
    parameters = [p for module in modules for p in module.parameters()]
    return torch.optim.SGD(parameters, **SGD, fused=True)


def splits(row: Row, directory: Path, stages: int) -> list[list[str]]:
    """Return the modules of each stage: of pdmpi's plan where it has as many stages, else even blocks."""
    names = [f"pipedream-{'-'.join('1' * stages)}", f"interleaved-{'-'.join('1' * row.num_ranks)}"]
    for path in [directory / f"{row.model}-{row.size}-{name}.h5" for name in names]:
        if path.exists():
            plan = load_plan(path)
            if len(plan.stages) == stages:
                own = {name for name, _ in whole(row).named_children()}
                return [[layer for layer in s.layers if layer in own] for s in plan.stages]
    names = [name for name, _ in whole(row).named_children()]
    cuts = [round(i * len(names) / stages) for i in range(stages + 1)]
    return [names[a:b] for a, b in pairwise(cuts)]


def pipelined(row: Row, directory: Path, device: torch.device) -> Any:
    """Return a step of torch.distributed.pipelining."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loss = load_factory(config_of(row, 1).loss.factory)()
    kind = getattr(schedules, f"Schedule{row.schedule}")
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    own = [rank]
    if several:
        own = [rank, 2 * ranks - 1 - rank] if "ZBV" in row.schedule else [rank, rank + ranks]
    count = ranks * len(own)
    names = splits(row, directory, count)
    model = whole(row)
    cut = [nn.Sequential(*(model.get_submodule(name) for name in names[s])) for s in own]
    parts = [part.to(device, torch.bfloat16) for part in cut]
    del model, cut
    stages = [pipelining.PipelineStage(part, s, count, device) for part, s in zip(parts, own, strict=True)]
    schedule = kind(stages if several else stages[0], row.microbatches, loss_fn=loss)
    optimizer = optimizer_of(parts)
    source, target = batch_of(row)
    reads, judges = 0 in own, count - 1 in own

    def step() -> None:
        given = [source.to(device, non_blocking=True)] if reads else []
        wanted = {"target": target.to(device, non_blocking=True), "losses": []} if judges else {}
        schedule.step(*given, **wanted)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def parallel(row: Row, device: torch.device) -> Any:
    """Return a step of DistributedDataParallel, or of one GPU alone."""
    model = whole(row).to(device, torch.bfloat16)
    ranks = dist.get_world_size()
    wrapped: nn.Module = model
    if ranks > 1:
        wrapped = DistributedDataParallel(model, [device.index], gradient_as_bucket_view=True)
    if row.compiled:
        wrapped = torch.compile(wrapped, mode="reduce-overhead")
    loss = load_factory(config_of(row, 1).loss.factory)()
    optimizer = optimizer_of([model])
    source, target = batch_of(row)

    def step() -> None:
        output = wrapped(source.to(device, non_blocking=True))
        loss(output, target.to(device, non_blocking=True)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def run(row: Row, steps: int, directory: Path, device: torch.device) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    together = row.schedule in ("DistributedDataParallel", "one GPU")
    step = parallel(row, device) if together else pipelined(row, directory, device)
    for _ in range(WARM_UP):
        step()
    times = []
    torch.cuda.synchronize()
    dist.barrier()
    for _ in range(3):  # the median of three runs
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        dist.barrier()
        times.append((time.perf_counter() - begin) / steps)
    samples = row.size * (dist.get_world_size() if together else row.microbatches)
    memory: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(memory, int(torch.cuda.max_memory_reserved()))
    return {"samples_per_s": samples / sorted(times)[1], "memory_bytes": memory}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    local = int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    os.environ.update(
        RANK=os.environ["OMPI_COMM_WORLD_RANK"], WORLD_SIZE=os.environ["OMPI_COMM_WORLD_SIZE"],
        LOCAL_RANK=str(local), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(spec["port"]),
    )  # fmt: skip
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    with open(spec["output"] if rank == 0 else os.devnull, "a") as out:
        for fields, steps in spec["rows"]:
            row = Row(**{**fields, "shape": tuple(fields["shape"])})
            late = [time.time() > spec["deadline_unix_s"]]
            dist.broadcast_object_list(late, 0)
            if late[0]:
                found: dict[str, Any] = {"error": "out of time"}
            else:
                try:
                    found = run(row, steps, Path(spec["directory"]), device)
                except Exception as error:
                    found = {"error": f"{type(error).__name__}: {error}"[:300]}
            out.write(json.dumps({**asdict(row), **found}) + "\n")
            out.flush()
            if rank == 0:
                print(row.system, row.model, row.size, row.name, brief(found), file=sys.stderr, flush=True)
            if found.get("error", "out of time") != "out of time":
                break  # the process group may be in pieces
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
