"""What a batch job may be asked for: a site's defaults from TOML, overridden on the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pdmpi.errors import InputError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["JobOptions", "load_site", "merged"]


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line of printable characters")
    return text


Text = Annotated[str, AfterValidator(_one_line)]


class JobOptions(BaseModel):
    """Options of a batch job; each is a key of the site's TOML file and an option of ``pdmpi submit``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    partition: Text | None = None
    """Slurm partition."""
    account: Text | None = None
    """Account that is charged."""
    qos: Text | None = None
    """Quality of service."""
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] | None = None
    """Time limit, [days-]hours:minutes:seconds."""
    nodes: int | None = Field(default=None, ge=1)
    """Nodes; the plan's by default."""
    gpus_per_node: int | None = Field(default=None, ge=0)
    """GPUs of each node; as many as its ranks need by default if the plan's devices are GPUs."""
    ranks_per_gpu: int = Field(default=1, ge=1)
    """Ranks that share a GPU."""
    cpus_per_task: int = Field(default=1, ge=1)
    """CPU cores of each rank."""
    mem: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory of each node."""
    constraint: Text | None = None
    """Features that the nodes must have."""
    reservation: Text | None = None
    """Reservation to run in."""
    exclude: Text | None = None
    """Nodes to keep away from."""
    job_name: Text | None = None
    """Name of the job; the configuration's by default."""
    signal_before_s: int = Field(default=120, ge=0, le=65535)
    """Seconds before the time limit at which Slurm tells the job to checkpoint and stop."""
    max_restarts: int = Field(default=100, ge=0)
    """Times that the job is requeued, whether it asked for it or died."""
    max_deaths: int = Field(default=3, ge=0)
    """Deaths in a row without a new checkpoint after which it is not requeued any more."""
    launcher: Literal["mpirun", "mpiexec", "srun-pmix", "srun-pmi2"] = "mpirun"
    """What starts the ranks: mpirun (Open MPI), mpiexec or srun-pmi2 (MPICH), srun-pmix (Open MPI)."""
    launcher_args: tuple[Text, ...] = ()
    """Further arguments of the launcher."""
    modules: tuple[Text, ...] = ()
    """Environment modules to load."""
    venv: Text | None = None
    """Virtual environment to activate; the one that submits by default."""
    container: tuple[Text, ...] = ()
    """Command that runs another inside a container, ["apptainer", "exec", "--nv", "pdmpi.sif"]."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], Text] = Field(default_factory=dict)
    """Variables to export in the job."""


def load_site(path: Path) -> dict[str, Any]:
    """Read a site's defaults.

    Raises
    ------
    InputError
        The file cannot be read or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read site file {str(path)!r}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"site file {str(path)!r} is no valid TOML: {error}") from None


def merged(site: Mapping[str, Any], given: Mapping[str, Any]) -> JobOptions:
    """Check a site's defaults with what was given on the command line (None: not given).

    Raises
    ------
    InputError
        Names every unknown key with the nearest valid one, and every value out of its range.
    """
    values = {**site, **{key: value for key, value in given.items() if value is not None}}
    try:
        return JobOptions.model_validate(values)
    except ValidationError as error:
        problems = []
        for details in error.errors(include_url=False):
            key = str(details["loc"][0]) if details["loc"] else ""
            if details["type"] == "extra_forbidden":
                problems.append(f"unknown option {key!r}{nearest(key, JobOptions.model_fields)}")
            else:
                purpose = JobOptions.model_fields[key].description or ""
                problems.append(f"{key} = {details['input']!r}: {details['msg']} ({purpose.rstrip('.')})")
        raise InputError("; ".join(dict.fromkeys(problems))) from None
