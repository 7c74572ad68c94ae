"""Two hosts with a link between them, for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.lib.hosts import Lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab"), 2, "400mbit") as found:
        yield found
