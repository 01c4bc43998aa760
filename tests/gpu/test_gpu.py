"""The checks of `python -m tests.gpu`, one test each."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from tests.gpu.__main__ import load  # noqa: E402
from tests.gpu.check import CHECKS, Skip  # noqa: E402


@pytest.mark.parametrize("name", list(load()))
def test_on_a_gpu(name: str) -> None:
    try:
        print(CHECKS[name]())
    except Skip as reason:
        pytest.skip(str(reason))
