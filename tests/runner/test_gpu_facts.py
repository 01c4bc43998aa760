"""What a GPU must have."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from penstock.runner.cuda import gpu

ENOUGH = "3.6.0"


@pytest.mark.parametrize(
    ("capability", "triton", "words"),
    [
        ((9, 0), ENOUGH, ""),
        ((8, 0), "3.10.1+git12ab", ""),
        ((12, 0), "4.0.0", ""),
        ((7, 5), ENOUGH, "compute capability 8.0 or later (Ampere); T4 has 7.5: use another GPU"),
        ((9, 0), None, "Triton, which is not installed: install torch 2.10 or newer for Linux, which brings it along"),
        ((9, 0), "3.5.1", "Triton 3.6 or newer; this is 3.5.1: install torch 2.10 or newer, which brings it along"),
    ],
)
def test_what_is_lacking(capability: tuple[int, int], triton: str | None, words: str) -> None:
    assert gpu.find_missing("T4", capability, triton) == words


def test_the_version_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.8.0"))
    assert gpu.triton_version() == "3.8.0"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert gpu.triton_version() is None
