"""Kernels for a GPU that this process does not touch: they are asked for with tensors on the meta device and compiled
into Triton's cache on disk, where another process finds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from penstock.ops.registry import OPS
from penstock.ops.triton import launch
from penstock.ops.triton.keys import named, settle_keys


class _Elsewhere:
    """What Triton asks of a driver before it launches something."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@dataclass(frozen=True)
class Call:
    """A kernel as it was asked for."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def weight(self) -> int:
        """The longer a kernel, with all that it calls, the longer it takes to compile."""
        return _length(self.kernel)

    def compile(self) -> None:
        made = _run(self.kernel, *self.args, warmup=True, **self.options)
        if hasattr(driver, "make_launcher"):  # some versions compile a launcher for each signature
            driver.CudaLauncher(made.src, made.metadata)


_run = JITFunction.run


def _length(function: Any) -> int:
    """Of its source and of ours that it calls."""
    return len(function.src) + sum(_length(other) for other in named(function))


def stand_in(capability: tuple[int, int]) -> None:
    """From now on this process compiles for that GPU, and computes nothing."""
    triton.runtime.driver.set_active(_Elsewhere(capability))  # type: ignore[arg-type]
    launch.assumed = capability
    for op in OPS.values():
        for bodies in (op.bodies, op.exact_bodies):
            if "cuda" in bodies:
                bodies["meta"] = bodies["cuda"]
    settle_keys()


def wanted(work: Callable[[], object]) -> dict[tuple[str, str], Call]:
    """The kernels that `work` asks for, each once; none is compiled."""
    calls: dict[tuple[str, str], Call] = {}
    asked = None

    def run(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        nonlocal asked
        asked = Call(kernel, args, options)
        return _run(kernel, *args, warmup=True, **options)

    def hook(*, key: Any, **_: Any) -> bool:
        assert asked is not None
        calls.setdefault((asked.name, str(key)), asked)
        return True  # that it is there already

    JITFunction.run = run  # type: ignore[method-assign]
    knobs.runtime.jit_cache_hook = hook  # type: ignore[assignment]
    try:
        work()
    finally:
        JITFunction.run = _run  # type: ignore[method-assign]
        knobs.runtime.jit_cache_hook = None
    return calls


def compile_driver() -> None:
    """The library that Triton loads kernels with."""
    driver.CudaUtils()


def hash_compiler() -> None:
    """Triton reads its whole compiler before it first looks into the cache; what it finds is kept."""
    triton_key()


def cache_folder() -> str:
    return str(knobs.cache.dir)
