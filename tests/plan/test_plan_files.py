"""Profiles and plans on disk: round trips, the same bytes from the same inputs, and hostile files."""

from __future__ import annotations

import hashlib
import io
import os
import random
import resource
import subprocess
import sys
from dataclasses import replace

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import CLUSTERS, REPOSITORY, residual_net

from pdmpi.errors import InputError
from pdmpi.plan.alternatives import with_alternatives
from pdmpi.plan.cluster_file import load_cluster
from pdmpi.plan.hdf5 import Format, pack, replace_file, unpack
from pdmpi.plan.partition import partition
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.plan.store import (
    PLAN_FORMAT,
    PROFILE_FORMAT,
    load_plan,
    load_profile,
    plan_from_bytes,
    plan_to_bytes,
    save_plan,
    save_profile,
)

_BLOCK = 512


@pytest.fixture(scope="module")
def plan():
    choice = ScheduleChoice(recompute="auto", extra_in_flight=1)
    cluster = load_cluster(CLUSTERS / "a-4x4.toml")
    levels = tuple(
        replace(level, allreduce_efficiency=part, allreduce_work_s_per_byte=part * 1e-9)
        for level, part in zip(cluster.levels, (0.7, 1.2), strict=True)
    )
    return with_alternatives(partition(residual_net(), replace(cluster, levels=levels), choice))


@pytest.fixture(scope="module")
def image(plan) -> bytes:
    return plan_to_bytes(plan)


def resealed(data: bytes) -> bytes:
    """An attacker's file: any content, with a seal that matches."""
    words = data[:_BLOCK].rstrip(b"\0").rsplit(b" ", 1)[0]
    block = words + b" " + hashlib.sha256(data[_BLOCK:]).hexdigest().encode() + b"\n"
    return block.ljust(_BLOCK, b"\0") + data[_BLOCK:]


def edited(image: bytes, edit) -> bytes:
    """The image after an edit of its HDF5 content, sealed again."""
    buffer = io.BytesIO(image)
    with h5py.File(buffer, "r+") as file:
        edit(file)
    return resealed(buffer.getvalue())


def put(name: str, array, *, keep_seal: bool = True, **options):
    def edit(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, data=array, **options)
        if keep_seal:
            array_ = np.asarray(array)
            head = f"{array_.dtype.str} {array_.shape}".encode()
            seal = hashlib.sha256(head + np.ascontiguousarray(array_).tobytes()).hexdigest()
            file[name].attrs["sha256"] = np.bytes_(seal)

    return edit


def test_round_trips(plan, tmp_path):
    save_plan(plan, tmp_path / "plan.h5")
    assert load_plan(tmp_path / "plan.h5") == plan
    save_profile(plan.profile, tmp_path / "profile.h5")
    assert load_profile(tmp_path / "profile.h5") == plan.profile
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.h5", "profile.h5"]
    with h5py.File(tmp_path / "plan.h5") as file:
        assert file.attrs["format"] == b"pdmpi-plan"
        assert file["stages/replicas"][()].tolist() == [stage.replicas for stage in plan.stages]


def test_an_output_that_exists_is_kept(plan, tmp_path):
    path = tmp_path / "plan.h5"
    path.write_text("mine")
    with pytest.raises(InputError, match="exists; choose another name or give --force"):
        save_plan(plan, path)
    assert path.read_text() == "mine"
    save_plan(plan, path, force=True)
    assert load_plan(path) == plan
    with pytest.raises(InputError, match=r"directory .* does not exist"):
        save_plan(plan, tmp_path / "nowhere" / "plan.h5")


def test_a_write_that_fails_leaves_nothing(tmp_path):
    path = tmp_path / "plan.h5"
    path.write_text("before")

    def fail() -> None:
        with replace_file(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_the_same_inputs_give_the_same_bytes_whatever_the_hash_seed():
    program = (
        "import sys; sys.path[:0] = [{tests!r}, {root!r}]\n"
        "import hashlib\nfrom plan_cases import *\nfrom pdmpi.plan.alternatives import with_alternatives\n"
        "from pdmpi.plan.cluster_file import load_cluster\nfrom pdmpi.plan.partition import partition\n"
        "from pdmpi.plan.store import plan_to_bytes\n"
        "plan = with_alternatives(partition(residual_net(), load_cluster(CLUSTERS / 'b-2x8.toml')))\n"
        "print(hashlib.sha256(plan_to_bytes(plan)).hexdigest())\n"
    ).format(tests=str(REPOSITORY / "tests" / "plan"), root=str(REPOSITORY))
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }  # fmt: skip
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[: len(b) // 2], "damaged or truncated"),
        (lambda b: b"", "not a file of pdmpi"),
        (lambda b: b"\x89HDF\r\n\x1a\n" + b[8:], "not a file of pdmpi"),
        (lambda b: b[:2000] + bytes([b[2000] ^ 1]) + b[2001:], "damaged or truncated"),
        (lambda b: b.replace(b"pdmpi-plan 7 ", b"pdmpi-plan 9 ", 1), "format version 9, .* reads version 7"),
        (lambda b: b.replace(b"pdmpi-plan 7 ", b"pdmpi-test 2 ", 1), "is a pdmpi-test, not a pdmpi-plan"),
    ],
)
def test_damaged_files(image, damage, message):
    with pytest.raises(InputError, match=message):
        plan_from_bytes(damage(image))


HUGE = h5py.h5s.create_simple((1 << 40,))


def huge(file: h5py.File) -> None:
    del file["stages/replicas"]
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    h5py.h5d.create(file["stages"].id, b"replicas", h5py.h5t.NATIVE_INT64, HUGE, properties)


def external(file: h5py.File) -> None:
    del file["stages/replicas"]
    file.create_dataset("stages/replicas", shape=(4,), dtype="i8", external=[("/etc/passwd", 0, 32)])


def linked(file: h5py.File) -> None:
    del file["stages/replicas"]
    file["stages/replicas"] = h5py.ExternalLink("other.h5", "/x")


def soft(file: h5py.File) -> None:
    del file["stages/replicas"]
    file["stages/replicas"] = h5py.SoftLink("/stages/layers")


def referring(file: h5py.File) -> None:
    del file["stages/replicas"]
    file.create_dataset("stages/replicas", data=file.ref, dtype=h5py.ref_dtype)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (huge, "more than the whole file holds"),
        (external, "not stored contiguously"),
        (linked, "link to elsewhere"),
        (soft, "link to elsewhere"),
        (referring, "expected int64"),
        (lambda f: f.__delitem__("placement"), "'placement' is missing"),
        (put("placement", np.zeros((2, 5))), "holds float64, expected int64"),
        (put("placement", np.zeros(5, dtype="i8")), "expected 2 dimensions"),
        (put("stages/replicas", np.zeros(4, dtype="i2")), "holds int16, expected int64"),
        (put("stages/replicas", np.array([7], dtype="i8"), keep_seal=False), "does not match its SHA-256"),
        (put("stages/replicas", np.array([-1], dtype="i8")), "inconsistent arrays"),
        (put("stages/layers", np.array([0, 0], dtype="i8")), "every layer exactly once"),
        (put("profile/graph/inputs", np.array([[10**9, 0]], dtype="i8")), "is of no layer"),
        (put("profile/graph/shapes", np.array([-1], dtype="i8")), "negative or absurd"),
        (put("profile/costs/times_s", np.full((15, 2), np.nan)), "expected a finite number"),
        (put("prediction/period_s", np.inf), "period_s is inf"),
        (put("cluster/level_counts", np.array([0, 4], dtype="i8")), "a level's count is 0"),
        (put("profile/microbatch_size", np.int64(0)), "microbatch_size is 0"),
        (put("profile/graph/names", np.array([b"\xff"] * 15)), "no UTF-8"),
        (put("stages/replicas", np.arange(1, 3), chunks=(2,), compression="gzip"), "not stored contiguously"),
    ],
)
def test_hostile_content_with_a_valid_seal(image, edit, message):
    with pytest.raises(InputError, match=message):
        plan_from_bytes(edited(image, edit))


def test_fuzzed_files_are_refused_without_a_crash_or_a_memory_blow_up(image):
    """1,000 random edits, half of them sealed again so that the HDF5 library does parse them."""
    program = (
        "import random, resource, sys\n"
        f"sys.path[:0] = [{str(REPOSITORY / 'tests' / 'plan')!r}, {str(REPOSITORY)!r}]\n"
        "from test_plan_files import fuzz\n"
        "image = sys.stdin.buffer.read()\n"
        "for seed in range(1000):\n"
        "    fuzz(image, seed)\n"
        "    print(seed, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=image, capture_output=True, timeout=300)
    lines = done.stdout.split()
    assert done.returncode == 0, (done.returncode, lines[-1:], done.stderr[-2000:])
    assert len(lines) == 1000


def fuzz(image: bytes, seed: int) -> None:
    """Read one random edit of a plan under a memory limit."""
    limit = 3 << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    draw = random.Random(seed)
    data = bytearray(image)
    for _ in range(draw.choice([1, 1, 2, 8, 64])):
        at = draw.randrange(_BLOCK, len(data))
        width = draw.choice([1, 1, 4, 8])
        data[at : at + width] = draw.choice([draw.randbytes(width), b"\xff" * width, b"\0" * width])
    if draw.random() < 0.2:
        del data[draw.randrange(_BLOCK, len(data)) :]
    edit = resealed(bytes(data)) if seed % 2 else bytes(data)
    try:
        plan_from_bytes(edit)
    except InputError:
        pass


@settings(max_examples=60)
@given(st.binary(max_size=2000))
def test_any_bytes_are_refused(data):
    with pytest.raises(InputError):
        unpack(data, PROFILE_FORMAT)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9)))
def test_text_round_trips(values):
    from pdmpi.plan.hdf5 import texts, texts_array

    fmt = Format(name="t", version=1, datasets={"x": ("S", 1)})
    assert list(texts(unpack(pack({"x": texts_array(values)}, fmt), fmt)["x"])) == values


def test_formats_are_named():
    assert (PLAN_FORMAT.name, PROFILE_FORMAT.name) == ("pdmpi-plan", "pdmpi-profile")
