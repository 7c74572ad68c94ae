"""Ranks that are threads of one process share what torch keeps for a process."""

from __future__ import annotations

import pytest
from harness import serialise_forwards


@pytest.fixture
def one_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let them build and run their stages one at a time."""
    serialise_forwards(monkeypatch)
