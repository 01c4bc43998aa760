"""Five million steps of worlds that the ordinary run does not see."""

from __future__ import annotations

import pytest

from tests.simulation.run import main


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_more_worlds() -> None:
    assert main(["--steps", "5000000", "--workers", "1", "--seed", "1000000"]) == 0
