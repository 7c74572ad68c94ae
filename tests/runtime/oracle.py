"""The oracle: one process, the whole model, a plain list of old weights, the update rule of the papers.

It knows schedules only by two formulas: which version of a stage's weights microbatch k uses,
and how many microbatches one update averages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from fnmatch import fnmatch

import torch
from harness import traced as traced_of
from torch import Tensor
from torch.utils.data import default_collate

from pdmpi.config.run import RunConfig
from pdmpi.model.build import build_stage
from pdmpi.model.example import cast_floating, dtype_of
from pdmpi.model.factory import load_factory
from pdmpi.model.optimizer import make_optimizer
from pdmpi.model.tree import map_tree
from pdmpi.plan.plan import Plan
from pdmpi.plan.terms import SCHEDULES as TERMS
from pdmpi.runtime.feed import epoch_order


def depth(replicas: list[int], stage: int) -> int:
    return -(-sum(replicas[stage:]) // replicas[stage])


def version_rule(name: str, replicas: list[int], microbatches: int) -> Callable[[int, int], int]:
    """Return ``version(stage, k)`` as DESIGN and the papers have it."""
    if name in ("pipedream", "data-parallel") and microbatches == 1:
        return lambda s, k: max(0, k // replicas[s] - depth(replicas, s) + 1)
    if name == "pipedream-vsync":
        entered = depth(replicas, 0) - 1
        return lambda s, k: max(0, k // replicas[0] - entered) * replicas[0] // replicas[s]
    if name == "2bw":
        return lambda s, k: max(k // microbatches - 1, 0)
    if name == "model-parallel":
        return lambda s, k: k // (microbatches * (replicas[s] if microbatches == 1 else 1))
    assert name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"), name
    return lambda s, k: k // microbatches  # everything that flushes


def per_update(name: str, replicas: list[int], stage: int, microbatches: int) -> int:
    return replicas[stage] if microbatches == 1 else microbatches


def newest(name: str, replicas: list[int], stage: int, microbatches: int, k: int) -> int:
    """Updates that a stage made before the forward of microbatch k, under 1F1B."""
    done = max(0, k // replicas[stage] - depth(replicas, stage) + 1) * replicas[stage]
    return done // per_update(name, replicas, stage, microbatches)


class Rates:
    """The learning rate's factor at a stage: (lag + 1) ** (min(t / K, 1) - 1) over K updates."""

    def __init__(self, lag: int, warmup: int) -> None:
        self.lag, self.warmup = lag, warmup

    def __call__(self, update: int) -> float:
        return (self.lag + 1) ** (min(update / self.warmup, 1) - 1) if self.warmup else 1.0


def momentum_of(optimizer: torch.optim.Optimizer | None, masters: dict[str, Tensor]) -> dict[str, Tensor]:
    if optimizer is None:
        return {}
    found = {n: optimizer.state.get(p, {}).get("momentum_buffer") for n, p in masters.items()}
    return {n: buffer.clone() for n, buffer in found.items() if buffer is not None}


def grouped(config: RunConfig, of: dict[str, Tensor]) -> list[dict[str, object]]:
    """A stage's parameters, those that a group's patterns match with its arguments."""
    left, groups = dict(of), []
    for group in config.optimizer.groups:
        chosen = [n for n in left if any(fnmatch(n, pattern) for pattern in group.match)]
        groups.append({"params": [left.pop(n) for n in chosen], **group.args})
    return [{"params": list(left.values())}, *groups]


def clip(config: RunConfig, due: list[dict[str, Tensor]]) -> None:
    """Where the pipeline flushes by the norm of all stages, each parameter once, else by each stage's."""
    limit = config.optimizer.clip_norm
    if limit is None:
        return
    if TERMS[config.schedule.name].flushes:
        due = [{n: p for of in due for n, p in of.items()}]
    for of in due:
        torch.nn.utils.clip_grad_norm_(of.values(), limit)


def replay(
    config: RunConfig,
    plan: Plan,
    programs: list[int],
    device: str | torch.device = "cpu",
    skipped: Collection[int] = (),
    factor: Callable[[int], float] = lambda minibatch: 1.0,
) -> dict[str, Tensor]:
    """Return the parameters and running statistics after programs of so many minibatches each.

    The programs are those of one epoch, in order; ``skipped`` are updates, counted from 1, that no
    stage makes.  An update's learning rate is multiplied by the ``factor`` of its first minibatch.
    """
    traced = traced_of(config)
    names = [set(build_stage(traced, s.layers).state_dict()) for s in plan.stages]
    model = build_stage(traced, [name for s in plan.stages for name in s.layers], device=device)
    loss = load_factory(config.loss.factory)(**config.loss.args)
    dataset = load_factory(config.data.factory)(split="train", **config.data.args)
    replicas = [s.replicas for s in plan.stages]
    m = config.schedule.microbatches
    size = config.train.minibatch_size // m
    order = epoch_order(len(dataset), config.train.seed, 0).tolist()
    version = version_rule(config.schedule.name, replicas, m)
    dtype = dtype_of(config)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    masters = [
        {n: torch.nn.Parameter(p.detach().clone()) for n, p in parameters.items() if n in own}
        for own in names
    ]
    optimizers = [make_optimizer(config.optimizer, grouped(config, of)) if of else None for of in masters]
    base = {id(g): g["lr"] for optimizer in optimizers if optimizer for g in optimizer.param_groups}
    buffers = dict(model.named_buffers())
    stage_of = {n: s for s, own in enumerate(names) for n in own}
    sets = [[{n: b.clone() for n, b in buffers.items() if stage_of[n] == s} for _ in range(r)]
            for s, r in enumerate(replicas)]  # fmt: skip
    first = 0
    counts = [per_update(config.schedule.name, replicas, s, m) for s in range(len(masters))]
    lags = [max(k // c - version(s, k) for k in range(max(programs) * m)) for s, c in enumerate(counts)]
    rates = [Rates(lag, config.schedule.staleness_warmup) for lag in lags]
    lr = config.optimizer.args["lr"]

    def rate(s: int, update: int) -> float:
        return factor(update * counts[s] // m) * rates[s](update)

    for minibatches in programs:
        old = [[{n: p.detach().clone() for n, p in of.items()}] for of in masters]
        moves = [[momentum_of(*pair)] for pair in zip(optimizers, masters, strict=True)]
        sums: list[dict[str, Tensor]] = [{} for _ in masters]
        for k in range(minibatches * m):
            for s, of in enumerate(old):
                ahead, made = k // counts[s] - version(s, k), newest(config.schedule.name, replicas, s, m, k)
                for n, value in of[version(s, k)].items():
                    parameters[n].data.copy_(value)
                    if config.schedule.weight_prediction and n in moves[s][made]:
                        step = lr * rate(s, first // counts[s] + made)
                        parameters[n].data.sub_(ahead * step * moves[s][made][n])
                for n, value in sets[s][k % replicas[s]].items():
                    buffers[n].copy_(value)
            rows = order[(first + k) * size : (first + k + 1) * size]
            inputs, targets = map_tree(
                lambda tensor: tensor.to(device), default_collate([dataset[i] for i in rows])
            )
            output = traced.unflatten(model(traced.flatten(cast_floating(inputs, dtype, device)), first + k))
            gradients = torch.autograd.grad(
                loss(output, targets), list(parameters.values()), allow_unused=True
            )
            for s, own in enumerate(sets):
                for n in own[k % replicas[s]]:
                    own[k % replicas[s]][n] = buffers[n].clone()
            for n, g in zip(parameters, gradients, strict=True):
                if g is None:
                    continue
                held = sums[stage_of[n]]
                held[n] = held[n] + g if n in held else g
            due = [s for s, count in enumerate(counts) if (k + 1) % count == 0]
            for s in due:
                for n, p in masters[s].items():
                    p.grad = sums[s][n] / counts[s] if n in sums[s] else None
                sums[s] = {}
            clip(config, [masters[s] for s in due])
            for s in due:
                if optimizers[s] is not None and (k + 1) // counts[s] not in skipped:
                    for group in optimizers[s].param_groups:
                        group["lr"] = base[id(group)] * rate(s, (first + k) // counts[s])
                    optimizers[s].step()
                moves[s].append(momentum_of(optimizers[s], masters[s]))
                old[s].append({n: p.detach().clone() for n, p in masters[s].items()})
        for own in sets:  # drained: running statistics are averaged over the replicas
            for n in own[0]:
                if n.endswith(("running_mean", "running_var")):
                    mean = sum(of[n] for of in own) / len(own)
                    for of in own:
                        of[n] = mean.clone()
        first += minibatches * m
    found = {n: p.detach() for n, p in model.named_parameters()}  # the frozen ones stay
    found.update({n: p.detach() for of in masters for n, p in of.items()})
    found.update({n: b for own in sets for n, b in own[0].items()})
    return found
