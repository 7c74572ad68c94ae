"""`pdmpi export` and `pdmpi show` of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from torch import nn

from pdmpi.checkpoint import CheckpointWriter
from pdmpi.checkpoint.store import Alone
from pdmpi.cli.main import cli
from pdmpi.errors import InputError
from pdmpi.runtime.state import snapshot_of


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    tied = nn.Sequential(
        nn.Embedding(7, 4), nn.LSTM(4, 4, batch_first=True), nn.LayerNorm(4), nn.Linear(4, 7)
    )
    tied[3].weight = tied[0].weight
    return tied


@pytest.fixture(scope="module")
def run_dir(model, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    writer = CheckpointWriter(run_dir, group=Alone(), writers=[0], fingerprint="f")
    writer.save(12, snapshot_of(model, parameters, optimizer), {"epoch": 3})
    writer.finish()
    return run_dir


def invoke(*arguments: object):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def test_an_export_is_the_models_own_state_dict_tied_names_included(model, run_dir, tmp_path):
    done = invoke("export", run_dir, "-o", tmp_path / "m.safetensors", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["minibatch"], report["tensors"]) == (12, len(model.state_dict()))
    loaded = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    again = invoke("export", run_dir, "-o", tmp_path / "m.safetensors")
    assert isinstance(again.exception, InputError)
    assert "exists" in str(again.exception)


def test_show_lists_every_array(run_dir):
    done = invoke("show", run_dir)
    assert done.exit_code == 0, done.output
    for text in ("minibatches trained", "12", "1.weight_ih_l0", "16x4", "momentum_buffer", "shard-00000.h5"):
        assert text in done.output
    found = json.loads(invoke("show", run_dir / "checkpoints" / "step-000000000012", "--json").stdout)
    assert found["state"] == {"epoch": 3}
    assert "optimizer/2.bias/momentum_buffer" in found["shards"][0]["arrays"]


def test_a_directory_without_any_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for command in (("show", tmp_path), ("export", tmp_path, "-o", tmp_path / "m.safetensors")):
        done = invoke(*command)
        assert isinstance(done.exception, InputError)
        assert "holds no good checkpoint" in str(done.exception)
