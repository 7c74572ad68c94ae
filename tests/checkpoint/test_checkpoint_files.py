"""Damaged, foreign and hostile files are refused; safetensors, lock and status files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdmpi.checkpoint import Array, CheckpointWriter, Snapshot, latest, open_checkpoint
from pdmpi.checkpoint.arrays import path_of, split_path
from pdmpi.checkpoint.lock import RunLock
from pdmpi.checkpoint.safetensors import SafetensorsFile, export
from pdmpi.checkpoint.shard import read_shard, read_specs, write_shard
from pdmpi.checkpoint.status import RunStatus, read_status, write_status
from pdmpi.checkpoint.store import Alone
from pdmpi.errors import InputError

ARRAYS = {
    "a.weight": Array.of(np.arange(60, dtype="float32").reshape(3, 4, 5)),
    "b/weird %2F.name": Array.of(np.float64([np.nan, -0.0, np.inf])),
    "half": Array(np.arange(5, dtype="uint16"), "bfloat16"),
    "empty": Array.of(np.zeros((0, 3), "float16")),
    "flag": Array.of(np.array(True)),
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    writer = CheckpointWriter(run_dir, group=Alone(), writers=[0], fingerprint="f", keep=3)
    for step in (1, 2):
        writer.save(
            step, Snapshot(parameters=ARRAYS, optimizer={"half": {"step": ARRAYS["flag"]}}), {"s": step}
        )
    writer.finish()
    return run_dir


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3))
def test_any_name_makes_a_path_that_comes_back(parts):
    path = path_of(*parts)
    assert split_path(path) == tuple(parts)
    assert all(part not in ("", ".") for part in path.split("/"))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_or_a_cut_never_changes_what_is_read(run_dir, tmp_path, data):
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run_dir / "checkpoints" / "step-000000000002", copy)
    victim = copy / data.draw(st.sampled_from(["shard-00000.h5", "manifest.json"]))
    content = bytearray(victim.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    victim.write_bytes(content)
    try:
        found = open_checkpoint(copy).read(list(ARRAYS))
    except InputError:
        return
    assert [name for name in ARRAYS if not found.parameters[name].equals(ARRAYS[name])] == []


def test_nothing_lies_where_a_flipped_bit_keeps_hdf5_for_ever(run_dir):
    """In a global heap, where texts of any length lie, some do: it has no checksum, unlike this layout."""
    content = (run_dir / "checkpoints" / "step-000000000002" / "shard-00000.h5").read_bytes()
    assert b"GCOL" not in content
    assert content[8] == 3  # version of the superblock


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "manifest.json").unlink(), "cannot be read"),
        (lambda d: (d / "manifest.json").write_text("{}\n{}\n"), "no manifest"),
        (lambda d: (d / "manifest.json").write_bytes(os.urandom(99)), "is damaged"),
        (lambda d: (d / "shard-00000.h5").unlink(), "cannot be read"),
        (lambda d: (d / "shard-00000.h5").write_bytes(b"\x80\x04pickle"), "the manifest says"),
        (lambda d: os.truncate(d / "shard-00000.h5", 3000), "has 3000 bytes"),
    ],
)
def test_damage_is_named_and_the_older_one_taken(run_dir, tmp_path, damage, message):
    shutil.copytree(run_dir, tmp_path / "run")
    damage(tmp_path / "run" / "checkpoints" / "step-000000000002")
    notes: list[str] = []
    found = latest(tmp_path / "run", notice=notes.append)
    assert found.manifest.minibatch == 1
    assert len(notes) == 1
    assert message in notes[0]


def test_a_newer_format_is_named(run_dir, tmp_path):
    shutil.copytree(run_dir / "checkpoints" / "step-000000000001", tmp_path / "c")
    path = tmp_path / "c" / "manifest.json"
    head, _, body = path.read_text().partition("\n")
    path.write_text(json.dumps({**json.loads(head), "version": 7}) + "\n" + body)
    with pytest.raises(InputError, match="version 7 of the checkpoint format; this pdmpi reads 1"):
        open_checkpoint(tmp_path / "c")


def _external(file: h5py.File, tmp_path: Path) -> None:
    file.create_dataset("w", shape=(4,), dtype="f4", external=[("/etc/passwd", 0, 16)])


def _compressed(file: h5py.File, tmp_path: Path) -> None:
    file.create_dataset("w", data=np.zeros(4, "f4"), compression="gzip")


def _linked(file: h5py.File, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other.create_dataset("w", data=np.zeros(4, "f4"))
    file["w"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "w")


def _virtual(file: h5py.File, tmp_path: Path) -> None:
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "w", (4,))
    file.create_virtual_dataset("w", layout)


def _deep(file: h5py.File, tmp_path: Path) -> None:
    file["/".join("abcdefgh")] = np.zeros(4, "f4")


@pytest.mark.parametrize("make", [_external, _compressed, _linked, _virtual, _deep])
def test_hostile_storage_is_refused(tmp_path, make):
    path = tmp_path / "shard-00000.h5"
    write_shard(path, Snapshot(parameters={"w": Array.of(np.zeros(4, "f4"))}), "s")
    specs = {"w": read_specs(path)["parameters/w"]}
    with h5py.File(path, "a") as file:
        make(file, tmp_path)
        if "w" in file and make != _linked:
            file["w"].attrs.update(dict(file["parameters/w"].attrs))
    with pytest.raises(InputError, match=r"foreign|missing|deep"):
        read_specs(path)
    with pytest.raises(InputError, match=r"foreign|missing"):
        list(read_shard(path, specs))


def test_shards_of_two_checkpoints_are_not_mixed(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    shutil.copy(
        folder / "step-000000000001" / "shard-00000.h5", folder / "step-000000000002" / "shard-00000.h5"
    )
    assert "belongs to another checkpoint" in open_checkpoint(folder / "step-000000000002").verify()[0]


def test_export_is_read_by_the_safetensors_package(run_dir, tmp_path):
    found = latest(run_dir)
    assert export(found, tmp_path / "m.safetensors") == len(ARRAYS)
    loaded = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert loaded.keys() == ARRAYS.keys()
    assert loaded["half"].dtype == torch.bfloat16
    assert loaded["half"].view(torch.int16).tolist() == list(range(5))
    assert torch.equal(loaded["a.weight"], torch.arange(60.0).reshape(3, 4, 5))
    back = SafetensorsFile(tmp_path / "m.safetensors")
    assert back.names == ARRAYS.keys()
    assert all(back.read([name])[name].equals(array) for name, array in ARRAYS.items())
    with pytest.raises(InputError, match="holds no c, d; it belongs to another model"):
        back.read(["d", "c", "half"])


def test_files_of_the_safetensors_package_are_read(tmp_path):
    safetensors.numpy.save_file({"w": np.arange(6.0).reshape(2, 3)}, tmp_path / "m.safetensors")
    assert SafetensorsFile(tmp_path / "m.safetensors").read(["w"])["w"].bits.tolist() == [
        [0, 1, 2],
        [3, 4, 5],
    ]


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [1000000000], "data_offsets": [0, 4000000000]}}',
        b'{"w": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "EVIL", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"w": 3}',
        b"[" * 100_000,
    ],
)
def test_hostile_safetensors_are_refused(tmp_path, header):
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(InputError, match="no safetensors file"):
        SafetensorsFile(path)
    path.write_bytes(struct.pack("<Q", 1 << 60) + header)
    with pytest.raises(InputError, match="no safetensors file"):
        SafetensorsFile(path)


HOLD = """
import sys, time
from pathlib import Path
from pdmpi.checkpoint.lock import RunLock
lock = RunLock(Path(sys.argv[1]), job="41")
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_job_is_refused_and_a_killed_one_recovered(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match=f"in use by job 41, process {holder.pid} on "):
            RunLock(tmp_path, job="42")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        notes: list[str] = []
        lock = RunLock(tmp_path, job="42", wait_s=5, notice=notes.append)
    assert f"recovered the lock of job 41, process {holder.pid}" in notes[0]
    lock.release()
    RunLock(tmp_path, notice=notes.append).release()
    assert len(notes) == 1


def test_status_is_one_line_and_nonsense_is_none(tmp_path):
    assert read_status(tmp_path) is None
    status = RunStatus(status="requeue", minibatch=7, reason="SIGUSR1", job="12", restarts=1)
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status
    sed = ["sed", "-n", 's/.*"status": "\\([a-z]*\\)".*/\\1/p', tmp_path / "status.json"]
    assert subprocess.check_output(sed) == b"requeue\n"
    for text in ("", "[]", '{"status": "sleeping"}', '{"status": "done", "evil": 1}'):
        (tmp_path / "status.json").write_text(text)
        assert read_status(tmp_path) is None
