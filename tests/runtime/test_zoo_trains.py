"""Every model of the zoo, reduced, trained as a pipeline of the planner's own cuts: equal to the oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import assert_same, make_plan, train_local
from oracle import replay
from torch.utils.data import Dataset, Subset

from pdmpi.config.load import load_config
from pdmpi.config.run import RunConfig
from pdmpi.model.factory import load_factory
from pdmpi.plan.cluster import Cluster, Level
from pdmpi.plan.cuts import cuts_of
from pdmpi.plan.partition import partition
from pdmpi.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("one_random_state")

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = sorted(path.stem for path in CONFIGS.glob("*-small.toml"))
MOST_STAGES = {"awd-lm-small": 1, "gpt2-small": 2}
"""Of models whose head is their embedding: what lies between the two is in one stage with both."""

ROWS = {"amoebanet-d-small": 2, "inception-v3-small": 2}
"""Of a microbatch; 4 for all but the longest models."""


def some(of: str, samples: int, split: str, **args: Any) -> Dataset[Any]:
    """The first samples of another data set."""
    return Subset(load_factory(of)(split=split, **args), range(samples))


def configured(name: str, schedule: str, parts: int) -> RunConfig:
    given = load_config(CONFIGS / f"{name}.toml").model_dump()
    rows = ROWS.get(name, 4)
    taken = {"of": given["data"]["factory"], "samples": 5 * rows}
    given["data"] = {"factory": "test_zoo_trains:some", "args": {**taken, **given["data"]["args"]}}
    given["optimizer"] = {"name": "SGD", "args": {"lr": 0.01, "momentum": 0.9}}
    given["schedule"] = {"name": schedule, "microbatches": parts}
    given["train"] = {
        "minibatch_size": rows * parts, "epochs": 1, "dtype": "float64", "evaluate_every": 0,
    }  # fmt: skip
    return RunConfig.model_validate(given)


def planned(config: RunConfig, stages: int, replicas: int) -> Plan:
    """The planner's best plan of so many stages, the first replicated, were all layers with parameters alike.

    Models that share a parameter between far layers have fewer.
    """
    profile = make_plan(config, [1]).profile
    sizes = [8 * len(layer.parameters) for layer in profile.graph.layers]
    costs = tuple(
        replace(cost, parameter_bytes=size, forward_s=cost.forward_s if size else cost.forward_s / 10)
        for cost, size in zip(profile.costs, sizes, strict=True)
    )
    profile = replace(profile, costs=costs)
    shape = [replicas, *[1] * (min(stages, cuts_of(profile).most_stages) - 1)]
    level = Level(name="host", count=sum(shape), bandwidth_bytes_per_s=1e12)
    cluster = Cluster(name="one host", levels=(level,))
    choice = make_plan(config, [1]).schedule
    return partition(profile, cluster, choice, shape=shape)


@pytest.mark.parametrize("name", SMALL)
def test_trains_as_the_oracle(name: str) -> None:
    """Asynchronously in two to four stages, and with a flush over a replicated one."""
    most = 2 + SMALL.index(name) % 3
    for schedule, parts, stages, replicas in (("pipedream", 1, most, 1), ("1f1b", 2, 2, 2)):
        config = configured(name, schedule, parts)
        plan = planned(config, stages, replicas)
        assert len(plan.stages) == min(stages, MOST_STAGES.get(name, stages))
        expected = replay(config, plan, [5 // parts])
        for rank, state in enumerate(train_local(config, plan)):
            assert_same(state, expected, f"{schedule} on rank {rank}")
