"""Pictures of plans and sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pdmpi.plan.figures import COLOURS, figure, save
from pdmpi.plan.partition import estimate_of
from pdmpi.plan.plan import Plan
from pdmpi.plan.sweep import Outcome

__all__ = ["draw_plan", "draw_sweep"]


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw layers (times, parameter bytes), the stages that hold them, and the nodes of each stage."""
    rows = len(plan.stages)
    made, (layers, nodes) = figure(12, 4.4 + 0.42 * rows, heights=(3.0 + 0.42 * rows, 1.2))
    _draw_layers(plan, layers)
    _draw_nodes(plan, nodes)
    save(made, path)


def _draw_layers(plan: Plan, axes: Any) -> None:
    stages = estimate_of(plan).stages
    costs, index = plan.profile.costs, plan.profile.graph.index
    slowest = max((c.forward_s + c.backward_s for c in costs), default=0.0) or 1.0
    largest = max(cost.parameter_bytes for cost in costs) or 1
    x = 0
    for s, (stage, cost) in enumerate(zip(plan.stages, stages, strict=True)):
        colour = COLOURS[s % len(COLOURS)]
        own = [costs[index[name]] for name in stage.layers]
        at = np.arange(x, x + len(own))
        axes.bar(at, [(c.forward_s + c.backward_s) / slowest for c in own], color=colour, width=0.9)
        axes.scatter(at, [c.parameter_bytes / largest for c in own], color="black", s=9, zorder=3)
        y = -0.15 - 0.28 * s
        axes.barh(y, len(own), left=x - 0.5, height=0.08, color=colour)
        seconds = (cost.forward_s + cost.backward_s) * 1e3
        text = (
            f"stage {s}: {stage.replicas} x {seconds:.3g} ms compute, period {cost.period_s * 1e3:.3g} ms "
            f"(bound by {cost.bound}), {cost.memory_bytes / 2**30:.2g} GiB a device, "
            f"{cost.parameter_bytes / 2**20:.3g} MiB of parameters, sends {cost.sent_bytes / 2**20:.3g} MiB"
        )
        axes.text(-0.5, y - 0.12, text, va="center", fontsize=8)
        x += len(own)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlim(-0.5, x - 0.5)
    axes.set_ylim(-0.12 - 0.28 * len(stages), 1.08)
    axes.set_yticks([0, 0.5, 1], ["0", f"{slowest * 500:.3g} ms", f"{slowest * 1e3:.3g} ms"])
    axes.set_xlabel("layers, in the order of the stages")
    axes.set_ylabel("forward + backward", loc="top")
    shape = "-".join(str(stage.replicas) for stage in plan.stages)
    axes.set_title(
        f"{shape} on {plan.cluster.name}, {plan.schedule.name}: {plan.prediction.samples_per_s:.4g} "
        f"samples/s (dots: parameters, highest {largest / 2**20:.3g} MiB)",
        fontsize=10,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_nodes(plan: Plan, axes: Any) -> None:
    per_node, total = plan.cluster.devices_per_node, plan.cluster.num_devices
    played = {p.node * per_node + p.device: p.stage for p in reversed(plan.placement)}
    for device in range(total):
        stage = played.get(device)
        colour = "0.92" if stage is None else COLOURS[stage % len(COLOURS)]
        axes.bar(device, 1, width=0.9, color=colour, edgecolor="0.4", linewidth=0.5)
        if total <= 64:
            axes.text(
                device, 0.5, "idle" if stage is None else f"s{stage}", ha="center", va="center", fontsize=7
            )
    edges = range(per_node, total, per_node)
    for edge in edges:
        axes.axvline(edge - 0.5, color="black", linewidth=1.5)
    number = total // per_node
    every = -(-number // 32)
    shown = range(0, number, every)
    axes.set_xticks([(n + 0.5) * per_node - 0.5 for n in shown], [f"node {n}" for n in shown], fontsize=8)
    axes.set_xlim(-0.5, total - 0.5)
    axes.set_yticks([])
    axes.set_title("devices, by node", fontsize=9)


def draw_sweep(path: Path, outcomes: Sequence[Outcome], names: Mapping[float, str]) -> None:
    """Draw throughput against devices, a line for each bandwidth, data parallelism dashed."""
    made, (axes,) = figure(8, 5)
    for i, (rate, name) in enumerate(names.items()):
        own = [one for one in outcomes if one.case.bandwidth_bytes_per_s == rate]
        at = [one.case.devices for one in own]
        colour = COLOURS[i % len(COLOURS)]
        rates_of = [one.samples_per_s or np.nan for one in own]
        axes.plot(at, rates_of, marker="osv^D"[i % 5], markersize=9 - i % 5, color=colour, label=name)
        axes.plot(at, [one.data_parallel_per_s or np.nan for one in own], "--", color=colour, alpha=0.6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    counts = sorted({one.case.devices for one in outcomes})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("devices")
    axes.set_ylabel("samples/s")
    axes.set_title(
        "Best plan (solid) and data parallelism (dashed), by bandwidth of the outer links", fontsize=10
    )
    axes.grid(alpha=0.3)
    axes.legend(title="bandwidth")
    save(made, path)
