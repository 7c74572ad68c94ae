"""Pictures of plans and sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pdmpi.plan.figures import COLOURS, save
from pdmpi.plan.figures import figure as canvas
from pdmpi.plan.partition import estimate_of
from pdmpi.plan.plan import Plan
from pdmpi.plan.sweep import Outcome

__all__ = ["draw_plan", "draw_sweep"]


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw layers (times, parameter bytes), the stages that hold them, and the nodes of each stage."""
    stages = estimate_of(plan).stages
    figure, axes = canvas(12, 3.2 + 0.45 * len(stages))
    costs = plan.profile.costs
    index = plan.profile.graph.index
    count = sum(len(stage.layers) for stage in plan.stages)
    x = 0
    top = max((c.forward_s + c.backward_s for c in costs), default=0.0) * 1e3 or 1.0
    most = max(cost.parameter_bytes for cost in costs) or 1
    rows = len(plan.stages)
    for s, (stage, cost) in enumerate(zip(plan.stages, stages, strict=True)):
        colour = COLOURS[s % len(COLOURS)]
        own = [costs[index[name]] for name in stage.layers]
        at = np.arange(x, x + len(own))
        axes.bar(at, [(c.forward_s + c.backward_s) * 1e3 / top for c in own], color=colour, width=0.9)
        axes.scatter(at, [c.parameter_bytes / most for c in own], color="black", s=9, zorder=3)
        y = -0.35 - 0.32 * s
        axes.barh(y, len(own), left=x - 0.5, height=0.24, color=colour)
        nodes: dict[int, int] = {}
        for p in plan.placement:
            if p.stage == s:
                nodes[p.node] = nodes.get(p.node, 0) + 1
        places = ", ".join(f"node {node} ({number})" for node, number in sorted(nodes.items()))
        text = (
            f" stage {s}: {stage.replicas} x {(cost.forward_s + cost.backward_s) * 1e3:.3g} ms, period "
            f"{cost.period_s * 1e3:.3g} ms ({cost.bound}), {cost.memory_bytes / 2**30:.2g} GiB, "
            f"sends {cost.sent_bytes / 2**20:.3g} MiB; {places} "
        )
        right = x + len(own) / 2 > count / 2
        edge = x - 0.5 if right else x + len(own) - 0.5
        axes.text(edge, y, text, va="center", ha="right" if right else "left", fontsize=8)
        x += len(own)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlim(-0.5, count - 0.5)
    axes.set_ylim(-0.35 - 0.32 * rows, 1.08)
    axes.set_yticks([0, 0.5, 1], ["0", f"{top / 2:.3g} ms", f"{top:.3g} ms"])
    axes.set_xlabel("layers, in the order of the stages")
    axes.set_ylabel("forward + backward", loc="top")
    shape = "-".join(str(stage.replicas) for stage in plan.stages)
    axes.set_title(
        f"{shape} on {plan.cluster.name}, {plan.schedule.name}: {plan.prediction.samples_per_s:.4g} "
        f"samples/s (dots: parameters, highest {most / 2**20:.3g} MiB)",
        fontsize=10,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save(figure, path)


def draw_sweep(path: Path, outcomes: Sequence[Outcome], names: Mapping[float, str]) -> None:
    """Draw throughput against devices, a line for each bandwidth, data parallelism dashed."""
    figure, axes = canvas(8, 5)
    for i, (rate, name) in enumerate(names.items()):
        own = [one for one in outcomes if one.case.bandwidth_bytes_per_s == rate]
        at = [one.case.devices for one in own]
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(at, [one.samples_per_s or np.nan for one in own], marker="o", color=colour, label=name)
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
    save(figure, path)
