"""Runs pdmpi's rows of tools/bench/pipeline: started by it, one process a GPU."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "4")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from pipeline_rows import Row, config_of

from pdmpi.cli.plan import command as plan_command
from pdmpi.plan.cluster import Cluster, Device, Level
from pdmpi.plan.cluster_text import cluster_to_text
from pdmpi.plan.plan import Plan
from pdmpi.plan.store import load_plan, plan_from_bytes, plan_to_bytes, save_profile
from pdmpi.runtime.agree import from_rank_0
from pdmpi.runtime.cluster import measured_cluster
from pdmpi.runtime.place import open_transport
from pdmpi.runtime.profiling import profile_run
from pdmpi.runtime.setup import load_datasets
from pdmpi.runtime.trainer import Position, Trainer
from pdmpi.simulate.costs import costs_of
from pdmpi.simulate.report import summarise

PASSES = 2


class Mute:
    """Listens to nothing."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def progress(self, *_: object) -> None: ...

    def segment(self, *_: object) -> None: ...

    def evaluated(self, *_: object) -> None: ...


class Bench:
    """One process."""

    def __init__(self, directory: Path, picture: str) -> None:
        first = Row(system="pdmpi", model="gpt", size=1, schedule="pipedream", shape=(1,))
        self.transport, self.device, notes = open_transport(config_of(first, 8))
        self.directory = directory
        self.picture = picture
        if self.transport.rank == 0 and notes:
            print(*notes, sep="\n", file=sys.stderr)
        self._write_cluster()

    def _write_cluster(self) -> None:
        if self.transport.size > 1:
            cluster = measured_cluster(self.transport, self.device)
        else:
            memory = torch.cuda.get_device_properties(self.device).total_memory
            card = Device(name=torch.cuda.get_device_name(self.device), memory_bytes=memory)
            level = Level(name="one", count=1, bandwidth_bytes_per_s=3e11)
            cluster = Cluster(name="bench", levels=(level,), devices=(card,), devices_per_node=1)
        if self.transport.rank == 0:
            (self.directory / "cluster.toml").write_text(cluster_to_text(cluster, "measured"))

    def plan(self, row: Row, minibatches: int) -> Plan:
        """Profile (once a model and size) and plan, on rank 0."""
        return plan_from_bytes(from_rank_0(self.transport, lambda: self._planned(row, minibatches)))

    def _planned(self, row: Row, minibatches: int) -> bytes:
        kind = f"{row.model}-{row.depth}-{row.dropout}-{row.size}" + ("-compiled" if row.compiled else "")
        profile = self.directory / f"{kind}.h5"
        if not profile.exists():
            single = replace(row, schedule="pipedream", microbatches=1)
            found = profile_run(config_of(single, minibatches), device=self.device, budget_s=6.0)
            save_profile(found, profile)
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()  # of the profile's streams; a run has its own process
            torch.cuda.empty_cache()
        output = self.directory / f"{row.model}-{row.size}-{row.schedule}-{'-'.join(map(str, row.shape))}.h5"
        arguments = [str(profile), "--cluster", str(self.directory / "cluster.toml")]
        arguments += ["-o", str(output), "--force"]
        arguments += ["--schedule", row.schedule, "--microbatches", str(row.microbatches)]
        arguments += ["--recompute", row.recompute]
        if row.schedule in ("pipedream", "auto"):
            arguments += ["--extra-in-flight", "auto"]
        if row.shape and row.schedule not in ("data-parallel", "interleaved"):
            arguments += ["--shape", "-".join(map(str, row.shape))]
        with contextlib.redirect_stdout(io.StringIO()):
            plan_command.main(arguments, standalone_mode=False)
        return plan_to_bytes(load_plan(output))

    def run(self, row: Row, minibatches: int) -> dict[str, Any]:
        """Train, and return what was measured (on rank 0)."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        begin = time.monotonic()
        plan = self.plan(row, minibatches)
        planned = time.monotonic()
        chosen = replace(row, schedule=plan.schedule.name, microbatches=plan.schedule.microbatches)
        parts = plan.schedule.microbatches // row.microbatches  # the planner may choose larger minibatches
        config = config_of(chosen, max(minibatches // parts, 4))
        listener = Mute()
        trainer = Trainer(config, plan, self.transport, load_datasets(config), listener, self.device)
        built = time.monotonic()
        torch.cuda.reset_peak_memory_stats()
        position = Position()
        for _ in range(PASSES):
            position = trainer.epoch(position)
        timeline = trainer.timeline()
        allocated = torch.cuda.max_memory_allocated()
        mine = json.dumps([self._memory(), self._graphs(trainer), allocated]).encode()
        everyone = [json.loads(part) for part in self.transport.gather(mine)]
        trainer.close()
        if timeline is None:
            return {}
        costs = costs_of(plan)
        report = summarise(timeline, costs, row.size)
        if self.picture and row.schedule == "pipedream" and row.shape == (1,) * self.transport.size:
            save_timeline(timeline, report, self.directory / f"timeline-{row.model}-{row.size}.json")
        return {
            "samples_per_s": report.samples_per_s,
            "predicted_samples_per_s": plan.prediction.samples_per_s,
            "busy": [rank.utilisation for rank in report.ranks],
            "memory_bytes": [part[0] for part in everyone],
            "predicted_memory_bytes": [rank.memory_bytes for rank in report.ranks],
            "predicted_memory_parts": [rank.memory_parts for rank in report.ranks],
            "allocated_bytes": [part[2] for part in everyone],
            "graphs": [part[1] for part in everyone],
            "plan": f"{plan.schedule.name} {'-'.join(str(s.replicas) for s in plan.stages)} "
                    f"+{plan.schedule.extra_in_flight}, {plan.schedule.microbatches} microbatches",
            "seconds": [planned - begin, built - planned, time.monotonic() - built],
            "notices": listener.notices,
        }  # fmt: skip

    def _memory(self) -> int:
        """Return the most that torch held, and what boundaries and buckets of gradients hold beside it."""
        return int(torch.cuda.max_memory_reserved()) + self.transport.device_bytes

    def _graphs(self, trainer: Trainer) -> str:
        players = trainer.rank.players.values()
        found = [getattr(p, "why_eager", "") or str(getattr(p, "num_graphed", 0)) for p in players]
        return trainer.rank.why_eager or " ".join(found)


def save_timeline(timeline: Any, report: Any, path: Path) -> None:
    """Keep ten minibatches of the steady state: for each rank, (operation, minibatch, start, end)."""
    begin = report.steady_from_s
    end = begin + 10 * report.period_s
    ranks = []
    for rows, starts, ends in zip(timeline.program.rows, timeline.start_s, timeline.end_s, strict=True):
        ranks.append([
            (int(row[0]), int(row[2]), float(s - begin), float(e - begin))
            for row, s, e in zip(rows, starts, ends, strict=True) if e > begin and s < end
        ])  # fmt: skip
    path.write_text(json.dumps({"period_s": report.period_s, "ranks": ranks}))


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    deadline = spec["deadline_unix_s"]
    bench = Bench(Path(spec["directory"]), spec["picture"])
    rank = bench.transport.rank
    with open(spec["output"] if rank == 0 else os.devnull, "a") as out:
        for fields, minibatches in spec["rows"]:
            row = Row(**{**fields, "shape": tuple(fields["shape"])})
            late = from_rank_0(bench.transport, lambda: b"1" if time.time() > deadline else b"0")
            if late == b"1":
                found: dict[str, Any] = {"error": "out of time"}
            else:
                try:
                    found = bench.run(row, minibatches)
                except Exception as error:
                    if os.environ.get("PDMPI_DEBUG"):
                        raise
                    found = {"error": f"{type(error).__name__}: {error}"[:300]}
            out.write(json.dumps({**asdict(row), **found}) + "\n")
            out.flush()
            if rank == 0:
                print(row.system, row.model, row.size, row.name, brief(found), file=sys.stderr, flush=True)
    bench.transport.close()


def brief(found: dict[str, Any]) -> str:
    if "error" in found:
        return found["error"]
    keys = ("samples_per_s", "predicted_samples_per_s", "busy", "graphs", "plan", "seconds")
    shown = {key: found[key] for key in keys if key in found}
    return json.dumps(shown)


if __name__ == "__main__":
    main()
