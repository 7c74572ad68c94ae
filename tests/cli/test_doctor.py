"""``pdmpi doctor``, alone and in a job."""

from __future__ import annotations

import json

from click.testing import CliRunner
from launch import PDMPI, each_mpi, mpirun

from pdmpi.cli.doctor import command
from pdmpi.transport.launcher import launched_size
from pdmpi.transport.links import link_pairs, measure_links
from pdmpi.transport.local import LocalWorld


def test_alone_it_names_every_topic() -> None:
    assert launched_size({}) is None
    result = CliRunner().invoke(command, ["--json"])
    assert result.exit_code == 0, result.output
    findings = {finding["topic"]: finding for finding in json.loads(result.output)["findings"]}
    assert set(findings) >= {"MPI", "Python", "torch", "cores", "CUDA", "Slurm", "HDF5"}
    assert "MPI_THREAD_MULTIPLE" in findings["MPI"]["found"]
    assert all(f["remedy"] for f in findings.values() if f["status"] == "problem")


@each_mpi
def test_in_a_job_it_measures_the_links(mpi: str) -> None:
    job = mpirun(2, [*PDMPI, "doctor", "--json"], mpi)
    data = json.loads(job.stdout)
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    assert len(data["hosts"]) == 1
    assert data["hosts"][0]["findings"]
    (link,) = data["links"]
    assert (link["source"], link["target"], link["memory"]) == (0, 1, "host")
    assert 1e-8 < link["latency_s"] < 0.1
    assert 1e7 < link["bandwidth_bytes_per_s"] < 1e12


def test_links_of_few_and_of_many_ranks() -> None:
    assert link_pairs(3) == [(0, 1), (0, 2), (1, 2)]
    assert link_pairs(20) == [(rank, rank + 1) for rank in range(19)]
    links = LocalWorld(3).run(lambda transport: measure_links(transport, [(0, 1), (1, 2)]))[2]
    assert [(link.source, link.target) for link in links] == [(0, 1), (1, 2)]
