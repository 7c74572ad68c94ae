"""Run on every rank by test_mpi_oracle.py: train over real MPI and compare with the oracle.

Options that only some schedules know are compared with the same run on threads, which other tests
compare with one process.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest
from harness import assert_same, make_plan, run_config, serialise_forwards, train_local, train_rank
from oracle import replay
from torch import Tensor

from pdmpi.config.run import RunConfig, TransportConfig
from pdmpi.model.no_compiler import without_compiler
from pdmpi.plan.plan import Plan
from pdmpi.runtime.place import open_on


def on_threads(config: RunConfig, plan: Plan) -> dict[str, Tensor]:
    """Return the weights of the same run on ranks that are threads."""
    with pytest.MonkeyPatch.context() as patch:
        serialise_forwards(patch, forwards=False)
        return {name: tensor for state in train_local(config, plan) for name, tensor in state.items()}


def main() -> None:
    cases = json.loads(sys.argv[1])
    place, ways = sys.argv[2], sys.argv[3:]
    played = ({"cuda_graphs": False} if "eager" in ways else {}) | {"compile": "compiled" in ways}
    transport, device, _ = open_on(place, transport=TransportConfig(share_devices=True))
    for model, schedule, microbatches, replicas, minibatches, options in cases:
        config = run_config(model, schedule, microbatches, **options.get("train", {}))
        found = config.model_dump()
        gamma, chunks = options.pop("gamma", 1.0), options.pop("chunks", 1)
        found["optimizer"].update(options.get("optimizer", {}))
        if gamma != 1.0:
            found["optimizer"]["lr_schedulers"] = [{"name": "ExponentialLR", "args": {"gamma": gamma}}]
        found["runtime"].update(played)
        config = RunConfig.model_validate(found)
        plan = make_plan(config, replicas, chunks=chunks)
        state, trainer = train_rank(config, plan, transport, device=device)
        if options:
            expected = on_threads(config, plan)
        else:
            expected = replay(config, plan, [minibatches], device, factor=partial(pow, gamma))
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
