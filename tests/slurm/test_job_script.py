"""The batch script is a pure function in which no text of a user's becomes a command."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch import REPOSITORY

from pdmpi.errors import InputError
from pdmpi.slurm.commands import JobFailed, submit, wait
from pdmpi.slurm.environment import JobEnvironment, cleaned, parse_end_time
from pdmpi.slurm.options import JobOptions, load_site, merged
from pdmpi.slurm.script import Job, job_script, launch_command
from pdmpi.slurm.shape import JobShape, assignment, is_placed, shape_of, shape_problem

SHAPE = JobShape(num_ranks=5, num_nodes=2, ranks_per_node=3)


def make_job(**changes) -> Job:
    values = {
        "name": "digits",
        "shape": SHAPE,
        "uses_gpus": True,
        "command": ("pdmpi", "train", "/home/u/run.toml"),
        "directory": PurePath("/home/u"),
        "run_dir": PurePath("/scratch/u/50% run"),
        "options": JobOptions(),
    }
    return Job(**{**values, **changes})


def test_the_script_says_what_the_plan_and_the_site_want():
    options = JobOptions(partition="gpu", time="8:00:00", modules=("openmpi/5",), launcher="srun-pmix")
    lines = job_script(make_job(options=options)).splitlines()
    head = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert head == [
        'job-name="digits"', 'nodes="2"', 'ntasks="5"', 'ntasks-per-node="3"', 'cpus-per-task="1"',
        'gpus-per-node="3"', 'time="8:00:00"', 'partition="gpu"', 'signal="B:USR1@120"', 'chdir="/home/u"',
        'output="/scratch/u/50%% run/job.log"', 'open-mode="append"', "requeue",
    ]  # fmt: skip
    assert "module load openmpi/5 || exit 1" in lines
    first = next(line for line in lines[1:] if line and not line.startswith("#SBATCH"))
    assert first.startswith("for signal in USR1 USR2 TERM; do trap "), "before anything that takes time"
    assert "run_dir='/scratch/u/50% run'" in lines
    assert (
        "command=(srun --mpi=pmix --ntasks=5 --ntasks-per-node=3 --distribution=block --kill-on-bad-exit=1"
        " --cpus-per-task=1 --gpu-bind=none pdmpi train /home/u/run.toml)" in lines
    )


def test_ranks_that_share_gpus_ask_for_fewer():
    script = job_script(make_job(options=JobOptions(ranks_per_gpu=2)))
    assert '#SBATCH --gpus-per-node="2"' in script


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("mpirun", "mpirun -n 5 --map-by ppr:3:node --bind-to none --mca pml ucx"),
        ("mpiexec", "mpiexec -n 5 -ppn 3 --mca pml ucx"),
    ],
)
def test_launchers(launcher, expected):
    options = JobOptions(launcher=launcher, launcher_args=("--mca", "pml", "ucx"))
    assert shlex.join(launch_command(SHAPE, options)) == expected


hostile = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp", "Cn", "Co", "Cf"]), min_size=1)


@given(text=hostile)
def test_any_text_reaches_the_command_as_it_is(text):
    """The generated assignments, run by bash, give the very arguments back."""
    if not text.isprintable():
        return
    options = JobOptions(launcher_args=(text,), environment={"X": text}, container=(text,))
    script = job_script(make_job(command=("pdmpi", text), run_dir=PurePath("/r"), options=options))
    assignments = [li for li in script.splitlines() if li.startswith(("command=", "export X="))]
    probe = "\n".join([*assignments, 'printf "%s\\0" "$X" "${command[@]}"'])
    shown = subprocess.run(["bash", "-c", probe], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    x, *command = shown.stdout.decode().split("\0")[:-1]
    launcher = launch_command(SHAPE, options)
    assert (x, command) == (text, [*launcher, text, "pdmpi", text])


def test_a_backslash_in_the_run_directory_is_refused():
    with pytest.raises(InputError, match="no backslash"):
        job_script(make_job(run_dir=PurePath("/scratch/a\\b")))


@pytest.mark.parametrize("text", ["a\nrm -rf ~", "a\r#SBATCH --uid=0", "\x1b[2J", "a\u2028b", "nul\0"])
def test_line_breaks_and_control_characters_are_refused(text):
    with pytest.raises(InputError, match="one line of printable characters"):
        merged({}, {"partition": text})
    with pytest.raises(InputError, match="one line of printable characters"):
        job_script(make_job(name=text))


def test_unknown_and_wrong_options_are_all_named():
    with pytest.raises(InputError) as caught:
        merged({"partion": "gpu", "launcher": "prun", "nodes": 0}, {"time": "1h"})
    message = str(caught.value)
    assert "unknown option 'partion'; did you mean 'partition'?" in message
    assert "launcher = 'prun'" in message
    assert "'srun-pmix'" in message
    assert "nodes = 0" in message
    assert "time = '1h'" in message


def test_a_site_gives_defaults_and_the_command_line_wins(tmp_path):
    (tmp_path / "site.toml").write_text('partition = "gpu"\nqos = "long"\n[environment]\nA = "1"\n')
    options = merged(load_site(tmp_path / "site.toml"), {"qos": "short", "nodes": None})
    assert (options.partition, options.qos, options.nodes) == ("gpu", "short", None)
    assert options.environment == {"A": "1"}
    (tmp_path / "site.toml").write_text("partition =")
    with pytest.raises(InputError, match="no valid TOML"):
        load_site(tmp_path / "site.toml")
    with pytest.raises(InputError, match="cannot read site file"):
        load_site(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("nodes", "asked", "expected"),
    [
        ([0, 0, 1, 1], None, (4, 2, 2)),
        ([0, 0, 0, 1], None, (4, 2, 3)),
        ([0, 0, 0, 0], 2, (4, 2, 2)),
        ([0, 1, 2, 3, 4], 2, (5, 2, 3)),
    ],
)
def test_shapes(nodes, asked, expected):
    shape = shape_of(nodes, asked)
    assert (shape.num_ranks, shape.num_nodes, shape.ranks_per_node) == expected


def test_more_nodes_than_ranks_are_refused():
    with pytest.raises(InputError, match="nodes = 3: the plan has 2 ranks"):
        shape_of([0, 0], 3)


def test_a_node_that_is_spread_over_hosts_is_refused_with_both_shapes():
    assert is_placed([0, 0, 1, 1], ["a", "a", "b", "b"])
    assert is_placed([0, 0, 1, 1], ["a"] * 4)
    assert not is_placed([0, 0, 1, 1], ["a", "b", "a", "a"])
    assert shape_problem([0, 0, 0, 1], ["a", "b", "a", "b"]).startswith(
        "the plan is for 2 nodes of 3 + 1 ranks, this job has 2 hosts of 2 + 2 ranks (a: 2, b: 2): "
    )
    assert "for 1 node of 1 rank, this" in shape_problem([0], ["a", "b"])


@given(st.data())
def test_every_node_gets_a_host_of_its_own_size_or_none(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    nodes = data.draw(st.permutations([node for node, size in enumerate(sizes) for _ in range(size)]))
    hosts = data.draw(st.permutations([f"h{node}" for node, size in enumerate(sizes) for _ in range(size)]))
    found = assignment(nodes, hosts)
    assert found is not None
    assert sorted(found) == list(range(len(nodes)))
    assert is_placed(nodes, [hosts[process] for process in found])


def test_ranks_stay_where_they_are_if_that_fits_and_none_is_forced():
    assert assignment([0, 0, 1, 1], ["a", "a", "b", "b"]) == (0, 1, 2, 3)
    assert assignment([0, 1, 0, 1], ["a", "a", "b", "b"]) == (0, 2, 1, 3)
    assert assignment([0, 1, 1], ["a", "a", "b"]) == (2, 0, 1)
    assert assignment([0, 0, 0, 1], ["a", "a", "b", "b"]) is None
    assert assignment([0, 0], ["a", "b"]) is None


def test_what_a_job_knows_of_itself():
    environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_NUM_NODES": "x"}
    assert JobEnvironment.of(environ) == JobEnvironment(job="7", restarts=2)
    assert JobEnvironment.of({}) == JobEnvironment()
    assert parse_end_time("NONE") is None
    assert parse_end_time("2030-01-01T00:00:10\n") - parse_end_time("2030-01-01T00:00:00") == 10


NESTED = (
    "SLURM_JOB_ID", "SLURM_CONF", "SLURM_CONF_X", "SLURMD_NODENAME", "PMIX_RANK", "PMI_RANK", "PMI2_X",
    "OMPI_COMM_WORLD_RANK", "OMPI_MCA_pml", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_FILE_LOCATION", "PRTE_LAUNCHED",
    "PRTE_MCA_x", "SBATCH_ACCOUNT", "MPI_LOCALRANKID", "HYDI_CONTROL_FD",
)  # fmt: skip


def test_a_nested_job_inherits_nothing_of_the_outer_one():
    assert cleaned(dict.fromkeys(NESTED, "x")).keys() == {
        "SLURM_CONF", "OMPI_MCA_pml", "OMPI_ALLOW_RUN_AS_ROOT", "PRTE_MCA_x", "SBATCH_ACCOUNT",
    }  # fmt: skip


def test_the_chain_leaves_out_the_same(tmp_path):
    """slurm/chain.sbatch runs where there is no pdmpi, and so has a list of its own."""
    environ = fake(tmp_path, "sbatch", f"env -0 > {tmp_path}/environment; echo 1")
    outer = dict.fromkeys(NESTED, "x")
    command = ["bash", REPOSITORY / "slurm" / "chain.sbatch", "a.toml", "b.toml", tmp_path / "run"]
    subprocess.run(command, env=environ | outer, check=True, capture_output=True, cwd=tmp_path)
    seen = {line.partition("=")[0] for line in (tmp_path / "environment").read_text().split("\0")}
    assert seen & set(NESTED) == cleaned(outer).keys()


def fake(tmp_path, name, body) -> dict[str, str]:
    program = tmp_path / name
    program.write_text(f"#!/bin/bash\n{body}\n")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_a_job_that_finds_no_pdmpi_fails(tmp_path):
    environ = fake(tmp_path, "python", "exit 0")
    job = {"SLURM_SUBMIT_DIR": str(REPOSITORY), "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}
    script = ["bash", REPOSITORY / "slurm" / "train.sbatch", "run.toml", "plan.h5", tmp_path / "run"]
    done = subprocess.run(script, env=environ | job, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "see slurm/site.sh" in done.stderr


def test_submit_passes_the_script_and_reads_the_number(tmp_path):
    environ = fake(
        tmp_path, "sbatch", f'cat > {tmp_path}/script; echo "$@" > {tmp_path}/args; echo "12;cluster"'
    )
    assert submit("#!/bin/bash\n", environ, "afterok:3:4,singleton") == "12"
    assert (tmp_path / "script").read_text() == "#!/bin/bash\n"
    assert (tmp_path / "args").read_text().split()[1:] == [
        "--dependency=afterok:3:4,singleton", "--kill-on-invalid-dep=yes",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["afterok:1;rm -rf x", "--wrap=x", "after", "afterok:$(id)", "afterok:1,,"])
def test_a_dependency_that_is_none_is_refused(text):
    with pytest.raises(InputError, match="must be like afterok:12"):
        submit("", {}, text)


def test_what_slurm_says_is_passed_on(tmp_path):
    environ = fake(tmp_path, "sbatch", 'echo "sbatch: error: invalid partition" >&2; exit 1')
    with pytest.raises(InputError, match="invalid partition"):
        submit("", environ)
    with pytest.raises(InputError, match="sbatch is not on PATH"):
        submit("", {"PATH": str(tmp_path / "nowhere")})


def test_waiting_outlasts_requeues_and_reports_failure(tmp_path):
    states = ["RUNNING:0:0", "FAILED:75:0", "PENDING:75:0", "RUNNING:0:0", "COMPLETED:0:0"]
    (tmp_path / "states").write_text("\n".join(states) + "\n")
    body = (
        f"line=$(head -n1 {tmp_path}/states); sed -i 1d {tmp_path}/states\n"
        'echo "JobId=1 JobState=${line%%:*} ExitCode=${line#*:} NodeList=n1"'
    )
    environ = fake(tmp_path, "scontrol", body)
    told: list[str] = []
    wait("1", environ, told.append, poll_s=0.01)
    assert [line.split()[2] for line in told] == ["running", "failed", "pending", "running", "completed"]
    (tmp_path / "states").write_text("CANCELLED:0:15\n")
    with pytest.raises(JobFailed, match="CANCELLED, exit code 0:15"):
        wait("1", environ, poll_s=0.01)
