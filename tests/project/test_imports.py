"""Planning works where there is neither torch nor MPI, and rooms import in one direction."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "pdmpi"

PURE = ("errors", "config", "graph", "plan", "schedule", "simulate", "slurm")

HEAVY = ("torch", "mpi4py", "cupy", "sklearn", "safetensors", "libucx")

MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "graph": {"errors"},
    "plan": {"errors", "graph"},
    "schedule": {"errors", "graph", "plan"},
    "simulate": {"errors", "graph", "plan", "schedule"},
    "model": {"errors", "config", "graph", "plan"},
    "transport": {"errors"},
    "checkpoint": {"errors", "graph", "plan"},
    "slurm": {"errors", "config"},
    "runtime": {
        "errors", "config", "graph", "plan", "schedule", "simulate", "model", "transport", "checkpoint",
        "slurm",
    },
}  # fmt: skip
"""The rooms that each room may import; ``cli`` may import all."""

PLANNING_COMMANDS = ("plan", "show", "simulate", "check", "submit", "advise", "sweep", "import-profile")


def modules(room: str) -> list[str]:
    root = PACKAGE / room
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    names = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def imported(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import in line {node.lineno}"
            yield node.lineno, node.module or ""


BLOCKED = """
import importlib, sys
for name in {heavy!r}:
    sys.modules[name] = None
for name in {names!r}:
    importlib.import_module(name)
"""


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_import_without_torch_and_mpi(room: str) -> None:
    code = BLOCKED.format(heavy=HEAVY, names=modules(room))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", PLANNING_COMMANDS)
def test_planning_commands_need_neither(command: str) -> None:
    code = BLOCKED.format(heavy=HEAVY, names=[f"pdmpi.cli.{command.replace('-', '_')}"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_rooms_import_in_one_direction(room: str) -> None:
    root = PACKAGE / room
    wrong = []
    for file in sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]:
        for line, name in imported(file):
            target = name.split(".")[1] if name.startswith("pdmpi.") else ""
            if target and target != room and target not in MAY_IMPORT[room]:
                wrong.append(f"{file.relative_to(PACKAGE.parent)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_mpi4py_and_cupy_are_imported_by_transport_only() -> None:
    wrong = [
        f"{file.relative_to(PACKAGE.parent)}:{line} imports {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for line, name in imported(file)
        if name.split(".")[0] in ("mpi4py", "cupy") and file.parent.name != "transport"
    ]
    assert not wrong, "\n".join(wrong)


def scripts() -> list[Path]:
    """The Python scripts and modules of tools/."""
    files = [file for file in (PACKAGE.parent / "tools").rglob("*") if file.is_file()]
    first_lines = ((file, file.read_bytes().partition(b"\n")[0]) for file in files)
    return sorted(file for file, first in first_lines if file.suffix == ".py" or b"env python" in first)


def names_in(module: str) -> set[str]:
    """Return the names that a module of the package has, and the modules in it, without importing it."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = {inner.stem for inner in path.glob("*")}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {t.id for target in targets for t in ast.walk(target) if isinstance(t, ast.Name)}
    return names


def test_tools_find_what_they_import() -> None:
    """No test runs the benchmarks; one that had lost an import would be noticed when its figures are due."""
    missing = [
        f"{file.name}:{node.lineno} imports {node.module}.{alias.name}"
        for file in scripts()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pdmpi"
        for alias in node.names
        if alias.name not in names_in(str(node.module))
    ]
    assert len(scripts()) > 12
    assert not missing, "\n".join(missing)


def test_printing_is_left_to_the_command_line() -> None:
    wrong = [
        f"{file.relative_to(PACKAGE.parent)}:{node.lineno} prints"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.parent.name != "cli"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, "\n".join(wrong)
