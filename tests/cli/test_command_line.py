"""The command line is an interface: it changes only together with ``command_line.txt``.

``python tests/cli/test_command_line.py`` writes that file again.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pdmpi.cli.main import COMMANDS, cli

GOLDEN = Path(__file__).with_name("command_line.txt")


def described() -> Iterator[str]:
    for name in COMMANDS:
        command = importlib.import_module(f"pdmpi.cli.{name.replace('-', '_')}").command
        arguments = [p for p in command.params if isinstance(p, click.Argument)]
        yield " ".join(["pdmpi", name, *((p.name or "").upper() for p in arguments)])
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                needed = " (required)" if parameter.required else ""
                yield f"    {', '.join([*parameter.opts, *parameter.secondary_opts])}{needed}"


def test_command_line_is_frozen() -> None:
    assert "\n".join(described()) + "\n" == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    examples = result.output.partition("Examples:")[2]
    assert f"pdmpi {name}" in examples
    assert max(map(len, result.output.splitlines())) <= 110


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_reports_json(name: str) -> None:
    command = importlib.import_module(f"pdmpi.cli.{name.replace('-', '_')}").command
    assert any("--json" in p.opts for p in command.params)


def test_the_list_of_commands_imports_none_of_them() -> None:
    result = CliRunner().invoke(cli, ["--help"])
    assert result.exit_code == 0
    for name in COMMANDS:
        assert name in result.output


def test_json_of_doctor_is_json() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    assert result.exit_code in (0, 1)
    assert json.loads(result.stdout)


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(described()) + "\n", encoding="utf-8")
