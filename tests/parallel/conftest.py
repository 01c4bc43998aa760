from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.group import Group


@pytest.fixture(scope="session")
def group() -> Iterator[Group]:
    """Four rank processes for all tests of the folder."""
    made = Group()
    yield made
    made.close()
