"""Launches that take a compiled kernel without asking Triton, which here is played."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ops import test_triton  # noqa: F401  before Triton is imported

pytest.importorskip("triton")

from penstock.runner.compile import launch_cache  # noqa: E402

X, Y = torch.zeros(64), torch.zeros(64, dtype=torch.float16)


def _kernel(x: Any, num: Any, eps: Any, BLOCK: Any, LAST: Any = 7, PDL: Any = None) -> None:
    """Only its signature is looked at."""


class Played:
    """A kernel, and what was asked of Triton and of what it compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.device = 0
        self.kernel: Any = object.__new__(launch_cache.CachedKernel)
        self.kernel.__dict__.update(_launches={}, signature=inspect.signature(_kernel), run=self._run)
        hooks = SimpleNamespace(calls=[])
        self.hooks = hooks.calls
        monkeypatch.setattr(launch_cache, "_ENTER", hooks)
        monkeypatch.setattr(launch_cache, "_EXIT", SimpleNamespace(calls=[]))
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99 + device, raising=False)

    def _run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        self.asked.append(args)
        number = len(self.asked)
        return SimpleNamespace(
            run=lambda *given: self.launched.append((number, *given)),
            function=f"f{number}",
            packed_metadata=f"m{number}",
        )

    def __call__(self, *args: Any, grid: tuple[int, ...] = (5,), **options: Any) -> None:
        self.kernel[grid](*args, **options)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def test_the_second_launch_of_a_kind_goes_straight_to_the_compiled_kernel(played: Played) -> None:
    played(X, 32, 1e-5, 64, PDL=True, num_warps=4)
    assert len(played.asked) == 1 and not played.launched
    other = torch.ones(128)
    played(other, 32, 1e-5, 64, grid=(3, 2), PDL=True, num_warps=4)
    assert len(played.asked) == 1
    (launch,) = played.launched
    assert launch[:10] == (1, 3, 2, 1, 99, "f1", "m1", None, None, None)
    assert launch[10] is other and launch[11:] == (32, 1e-5, 64, 7, True)  # in the order of the signature


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((Y, 16, 1.0, 64), {}),
        ((X[1:], 16, 1.0, 64), {}),
        ((X, 17, 1.0, 64), {}),
        ((X, 16, 1, 64), {}),
        ((X, 16, True, 64), {}),
        ((None, 16, 1.0, 64), {}),
        ((X, 16, 1.0, 32), {}),
        ((X, 16, 1.0, 64), {"num_warps": 8}),
        ((X, 16, 1.0, 64, 7), {}),
        ((X, 16, 1.0, 64), {"LAST": 7}),
    ],
)
def test_what_may_take_another_kernel_is_asked_for(
    args: tuple[Any, ...], options: dict[str, Any], played: Played
) -> None:
    """Another type, an address that is not aligned, another number, one of another type, another option."""
    played(X, 16, 1.0, 64)
    played(*args, **options)
    assert len(played.asked) == 2 and not played.launched


def test_tensors_in_a_group_are_told_apart(played: Played) -> None:
    """A named tuple of arguments: what is in it decides, as if it were given one by one."""
    played((X, None, 3), 16, 1.0, 64)
    played((torch.ones(9), None, 3), 16, 1.0, 64)
    assert len(played.asked) == 1 and played.launched[0][10][2] == 3
    for group in ((Y, None, 3), (X[1:], None, 3), (X, X, 3), (X, None, 4), (X, None, 3.0)):
        played(group, 16, 1.0, 64)
    assert len(played.asked) == 6 and len(played.launched) == 1


def test_descriptors_are_told_apart_by_all_but_their_place(played: Played) -> None:
    def describe(base: torch.Tensor, *block: int) -> Any:
        return SimpleNamespace(base=base, block_shape=list(block), layout="swizzled", padding="zero")

    played(describe(X, 16, 64), 16, 1.0, 64)
    other = describe(torch.ones(9), 16, 64)
    played(other, 16, 1.0, 64)
    assert len(played.asked) == 1 and played.launched[0][10] is other
    for one in (describe(Y, 16, 64), describe(X, 32, 64), describe(X, 16, 4, 64)):
        played(one, 16, 1.0, 64)
    assert len(played.asked) == 4 and len(played.launched) == 1


def test_another_device_is_another_matter(played: Played) -> None:
    played(X, 1, 1.0, 64)
    played.device = 1
    played(X, 1, 1.0, 64)
    played(X, 1, 1.0, 64)
    assert len(played.asked) == 2 and played.launched[0][:5] == (2, 5, 1, 1, 100)


def test_those_who_watch_launches_are_told_of_each(played: Played) -> None:
    played(X, 1, 1.0, 64)
    played.hooks.append(print)
    played(X, 1, 1.0, 64)
    assert len(played.asked) == 2 and not played.launched


def test_a_kernel_remembers_no_more_than_it_may(played: Played) -> None:
    for number in range(launch_cache.MAX_LAUNCHES + 10):
        played(X, number, 1.0, 64)
    assert len(played.kernel._launches) <= launch_cache.MAX_LAUNCHES
    played(X, launch_cache.MAX_LAUNCHES + 9, 1.0, 64)
    assert len(played.launched) == 1


KINDS = """
import penstock.ops.triton.bodies
from penstock.ops.triton import norm
from penstock.ops.triton.attention import attention, prefill
from penstock.runner.compile import launch_cache
launch_cache.triton.__version__ = "{version}"
launch_cache.cache_launches()
kernels = norm._rms_norm, attention._decode, prefill.hopper._prefill_hopper
print([type(one).__name__ for one in kernels], kernels[-1].is_gluon())
"""


@pytest.mark.parametrize(
    ("version", "expected", "of_gluon"),
    [
        ("3.9.1+git3", "CachedKernel", "CachedGluonJITFunction"),
        pytest.param("3.5.1", "JITFunction", "GluonJITFunction", marks=pytest.mark.slow),
        pytest.param("3.10.0", "JITFunction", "GluonJITFunction", marks=pytest.mark.slow),
    ],
)
def test_all_of_ours_remember_where_triton_is_as_launches(version: str, expected: str, of_gluon: str) -> None:
    """A process of its own, where kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", KINDS.format(version=version)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.stdout.strip() == f"{[expected, expected, of_gluon]} True", done.stderr
