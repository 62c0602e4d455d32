"""Local workers that all tests of one process share; they start with the first test that asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwright.runtime.launch import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    with Workers(8) as pool:
        yield pool
