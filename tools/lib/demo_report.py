"""The last lines of tools/demo: what came out, and where it lies."""

from __future__ import annotations

import json
import sys
from pathlib import Path

GOAL = 0.95


def main(run: Path, seconds: str) -> int:
    """Print the report of a run directory; return 1 when the accuracy is too low."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    end = next(record for record in records if record["kind"] == "end")
    accuracy = end["test_accuracy"]
    print(f"""
test accuracy    {accuracy:.2%} (goal: {GOAL:.0%})
throughput       {end["samples_per_s"]:.0f} samples/s measured, {end["predicted_samples_per_s"]:.0f} predicted
whole chain      {seconds} s
pipeline drawn   {run / "pipeline.png"}
trace            {run / "trace.json"} (open it at https://ui.perfetto.dev)
the plan again   .venv-demo/bin/pdmpi show {run / "plan.h5"}
every loss       {run / "metrics.jsonl"}""")
    if accuracy < GOAL:
        print(f"the accuracy is below {GOAL:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
