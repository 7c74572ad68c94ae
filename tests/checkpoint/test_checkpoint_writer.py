"""Checkpoints written by ranks as threads: complete or not there, verified, re-sharded, in bounded space."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from pdmpi.checkpoint import Array, CheckpointWriter, Snapshot, latest, open_checkpoint
from pdmpi.errors import InputError
from pdmpi.transport.local import LocalWorld


def snapshot_of(rank: int, step: int, width: int = 64) -> Snapshot:
    rng = np.random.default_rng([rank, step])
    name = f"block{rank}.conv.weight"
    weight = Array.of(rng.standard_normal((width, 3, 3, 3)))
    return Snapshot(
        parameters={name: weight, f"block{rank}.bias": Array(rng.integers(0, 9999, 7, "uint16"), "bfloat16")},
        optimizer={name: {"momentum_buffer": weight, "step": Array.of(np.array(float(step), "float32"))}},
        buffers={f"block{rank}.bn.num_batches_tracked": Array.of(np.array(step))},
    )


def run_ranks(size: int, body) -> list:
    world, results, errors = LocalWorld(size), [None] * size, []

    def rank_main(rank: int) -> None:
        try:
            results[rank] = body(world.transport(rank))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results


def write(run_dir: Path, steps, size: int = 3, keep: int = 2, notes: list[str] | None = None, start: int = 0):
    notes = [] if notes is None else notes

    def body(group):
        writer = CheckpointWriter(
            run_dir,
            group=group,
            writers=range(size),
            fingerprint="f",
            keep=keep,
            start=start,
            notice=notes.append,
        )
        paths = []
        for step in steps:
            writer.save(step, snapshot_of(group.rank, step), {"epoch": step // 100, "lr": 0.1})
            paths.append(writer.finish())
        return paths

    return run_ranks(size, body)


def assert_equal(got: Snapshot, want: Snapshot) -> None:
    a, b = dict(got.items()), dict(want.items())
    assert a.keys() == b.keys()
    assert [name for name in a if not a[name].equals(b[name])] == []


def test_every_name_comes_back_bitwise_for_any_subset(tmp_path):
    write(tmp_path, [100])
    found = latest(tmp_path)
    assert found is not None
    assert found.verify() == []
    assert (found.manifest.minibatch, found.manifest.state) == (100, {"epoch": 1, "lr": 0.1})
    for ranks in ([0], [1, 2], [0, 1, 2]):
        parts = [snapshot_of(rank, 100) for rank in ranks]
        want = Snapshot(
            parameters={k: v for p in parts for k, v in p.parameters.items()},
            optimizer={k: v for p in parts for k, v in p.optimizer.items()},
            buffers={k: v for p in parts for k, v in p.buffers.items()},
        )
        names = [*want.parameters, *want.buffers]
        assert_equal(found.read(names), want)
    with pytest.raises(InputError, match="holds no other"):
        found.read(["other.weight"])


def test_only_the_newest_stay(tmp_path):
    paths = write(tmp_path, [10, 20, 30, 40], keep=2)
    assert paths[0] == paths[1] == paths[2]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-000000000030",
        "step-000000000040",
    ]


def test_a_copy_is_written_not_what_training_changes_meanwhile(tmp_path):
    def body(group):
        live = np.zeros(2_000_000)
        writer = CheckpointWriter(tmp_path, group=group, writers=[0], fingerprint="f")
        for step in (1, 2):
            live[:] = step
            writer.save(step, Snapshot(parameters={"w": Array.of(live)}), {})
            live[:] = -1
        writer.finish()

    run_ranks(1, body)
    for step in (1, 2):
        found = open_checkpoint(tmp_path / "checkpoints" / f"step-{step:012d}")
        assert set(found.read(["w"]).parameters["w"].bits) == {step}


def test_a_damaged_one_is_passed_over_and_said(tmp_path):
    write(tmp_path, [10, 20, 30], keep=3)
    shard = tmp_path / "checkpoints" / "step-000000000030" / "shard-00001.h5"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)
    (tmp_path / "checkpoints" / "step-000000000020" / "shard-00002.h5").unlink()
    notes: list[str] = []
    found = run_ranks(2, lambda group: latest(tmp_path, group, notes.append))
    assert [c.manifest.minibatch for c in found] == [10, 10]
    assert len(notes) == 2
    assert "step-000000000030 is passed over" in notes[0]
    assert "do not match their hash" in notes[0]
    assert "step-000000000020" in notes[1]


def test_a_start_at_an_older_one_sets_the_newer_aside(tmp_path):
    write(tmp_path, [10, 20], keep=3)
    notes: list[str] = []
    write(tmp_path, [15], keep=3, notes=notes, start=10)
    assert "step-000000000020 is newer than this start" in notes[0]
    assert [latest(tmp_path).manifest.minibatch, len(list((tmp_path / "checkpoints").glob("step-*")))] == [
        15,
        2,
    ]


def test_leftovers_of_a_killed_writer_go(tmp_path):
    (tmp_path / "checkpoints" / ".writing-000000000005-dead").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".old-step-000000000001").mkdir()
    write(tmp_path, [10])
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000000000010"]


def test_one_rank_that_cannot_write_loses_the_new_one_only(tmp_path, monkeypatch):
    import pdmpi.checkpoint.writer as module

    real = module.write_shard

    def failing(path, snapshot, session):
        if path.name == "shard-00001.h5" and session.endswith("-20"):
            raise OSError(28, "No space left on device")
        return real(path, snapshot, session)

    monkeypatch.setattr(module, "write_shard", failing)
    notes: list[str] = []
    paths = write(tmp_path, [10, 20, 30], notes=notes)
    assert [p and p.name[-2:] for p in paths[0]] == ["10", None, "30"]
    assert len(notes) == 1
    assert "minibatch 20 is lost" in notes[0]
    assert "rank 1: [Errno 28] No space left" in notes[0]
    assert latest(tmp_path).manifest.minibatch == 30


def test_space_is_checked_first(tmp_path, monkeypatch):
    import pdmpi.checkpoint.writer as module

    monkeypatch.setattr(module, "free_bytes", lambda path: 17 << 20)
    notes: list[str] = []

    def body(group):
        writer = CheckpointWriter(tmp_path, group=group, writers=[0], fingerprint="f", notice=notes.append)
        arrays = Array.of(np.zeros(300_000))
        return writer.save(1, Snapshot(parameters={"w": arrays}) if group.rank == 0 else None, {})

    assert run_ranks(2, body) == [False, False]
    assert "needs 2400000 bytes and 16777216 to spare" in notes[0]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_hosts_that_see_different_directories_are_refused(tmp_path, monkeypatch):
    import pdmpi.checkpoint.writer as module

    monkeypatch.setattr(module, "_VISIBLE_S", 0.05)

    def body(group):
        with pytest.raises(InputError, match="of rank 1 is not the one that rank 0 sees"):
            CheckpointWriter(tmp_path / str(group.rank), group=group, writers=[0], fingerprint="f")

    (tmp_path / "1" / "checkpoints").mkdir(parents=True)
    run_ranks(2, body)


def test_a_path_that_is_no_directory_is_refused_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")

    def body(group):
        with pytest.raises(InputError, match="cannot be written"):
            CheckpointWriter(tmp_path / "file", group=group, writers=[0], fingerprint="f")

    run_ranks(2, body)


def test_replicas_keep_buffers_of_their_own(tmp_path):
    def body(group):
        mean = Array.of(np.full(4, float(group.rank)))
        first = Snapshot(parameters={"w": mean}, buffers={"bn.running_mean": mean})
        other = Snapshot(replica_buffers={1: {"bn.running_mean": mean}})
        writer = CheckpointWriter(tmp_path, group=group, writers=[0, 1], fingerprint="f")
        writer.save(1, other if group.rank else first, {})
        return writer.finish()

    run_ranks(2, body)
    found = latest(tmp_path)
    values = [
        found.read(["bn.running_mean"], replica=r).buffers["bn.running_mean"].bits[0] for r in (0, 1, 2)
    ]
    assert values == [0.0, 1.0, 0.0]
