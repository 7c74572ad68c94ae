"""Run on every rank by test_mpi_oracle.py: train over real MPI and compare with the oracle."""

from __future__ import annotations

import json
import sys

from harness import assert_same, make_plan, run_config, train_rank
from oracle import replay

from pdmpi.model.no_compiler import without_compiler
from pdmpi.runtime.place import open_transport


def main() -> None:
    cases = json.loads(sys.argv[1])
    place = sys.argv[2]
    transport, device, _ = open_transport(run_config("conv", device=place))
    for model, schedule, microbatches, replicas, minibatches in cases:
        config = run_config(model, schedule, microbatches)
        plan = make_plan(config, replicas)
        state, trainer = train_rank(config, plan, transport, device=device)
        expected = replay(config, plan, [minibatches], device)
        assert_same(state, expected, f"{schedule} {replicas} on rank {transport.rank}")
        parts = transport.gather(json.dumps(sorted(state)).encode())
        held = {name for part in parts for name in json.loads(part)}
        assert transport.rank or held == expected.keys(), held ^ expected.keys()
        if transport.rank == 0:
            graphs = sum(getattr(player, "num_graphed", 0) for player in trainer.rank.players.values())
            print("equal", model, schedule, "-".join(map(str, replicas)), graphs, "graphs", flush=True)
    transport.close()


with without_compiler():
    main()
