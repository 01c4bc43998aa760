from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.ops import cpu


@pytest.fixture(params=cpu.paths()[1:])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each compiled path of this machine in turn."""
    with cpu.override_path(request.param):
        yield request.param


@pytest.fixture
def threads() -> Iterator[None]:
    """The test may change the number of threads."""
    former = cpu.num_threads()
    yield
    cpu.set_num_threads(former)
