"""The oracle: one process, the whole model, a plain list of old weights, the update rule of the papers.

It knows schedules only by two formulas: which version of a stage's weights microbatch k uses,
and how many microbatches one update averages.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import traced as traced_of
from torch import Tensor

from pdmpi.config.run import RunConfig
from pdmpi.model.build import build_stage, load_factory
from pdmpi.model.optimizer import make_optimizer
from pdmpi.plan.plan import Plan
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
    return lambda s, k: k // microbatches  # everything that flushes


def per_update(name: str, replicas: list[int], stage: int, microbatches: int) -> int:
    return replicas[stage] if microbatches == 1 else microbatches


def replay(
    config: RunConfig, plan: Plan, programs: list[int], device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """Return the parameters and running statistics after programs of so many minibatches each.

    The programs are those of one epoch, in order.
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
    parameters = dict(model.named_parameters())
    masters = [
        {n: torch.nn.Parameter(p.detach().clone()) for n, p in parameters.items() if n in own}
        for own in names
    ]
    optimizers = [make_optimizer(config.optimizer, of.values()) if of else None for of in masters]
    buffers = dict(model.named_buffers())
    stage_of = {n: s for s, own in enumerate(names) for n in own}
    sets = [[{n: b.clone() for n, b in buffers.items() if stage_of[n] == s} for _ in range(r)]
            for s, r in enumerate(replicas)]  # fmt: skip
    first = 0
    for minibatches in programs:
        old = [[{n: p.detach().clone() for n, p in of.items()}] for of in masters]
        sums: list[dict[str, Tensor]] = [{} for _ in masters]
        for k in range(minibatches * m):
            for s, of in enumerate(old):
                for n, value in of[version(s, k)].items():
                    parameters[n].data.copy_(value)
                for n, value in sets[s][k % replicas[s]].items():
                    buffers[n].copy_(value)
            rows = order[(first + k) * size : (first + k + 1) * size]
            inputs, targets = zip(*(dataset[i] for i in rows), strict=True)
            values = traced.flatten(torch.stack(inputs).to(device))
            output = traced.unflatten(model(values, first + k))
            gradients = torch.autograd.grad(
                loss(output, torch.stack(targets).to(device)), list(parameters.values()), allow_unused=True
            )
            for s, own in enumerate(sets):
                for n in own[k % replicas[s]]:
                    own[k % replicas[s]][n] = buffers[n].clone()
            for n, g in zip(parameters, gradients, strict=True):
                held = sums[stage_of[n]]
                held[n] = held[n] + g if n in held else g
            for s, of in enumerate(masters):
                count = per_update(config.schedule.name, replicas, s, m)
                if (k + 1) % count == 0:
                    for n, p in of.items():
                        p.grad = sums[s][n] / count
                    sums[s] = {}
                    if optimizers[s] is not None:
                        optimizers[s].step()
                    old[s].append({n: p.detach().clone() for n, p in of.items()})
        for own in sets:  # drained: running statistics are averaged over the replicas
            for n in own[0]:
                if n.endswith(("running_mean", "running_var")):
                    mean = sum(of[n] for of in own) / len(own)
                    for of in own:
                        of[n] = mean.clone()
        first += minibatches * m
    found = {n: p.detach() for of in masters for n, p in of.items()}
    found.update({n: b for own in sets for n, b in own[0].items()})
    return found
