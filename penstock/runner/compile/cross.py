"""Cross-compile kernels without initializing CUDA: launches with meta tensors are recorded and compiled into Triton's
cache on disk, where another process finds them."""

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

import penstock.ops.triton.bodies  # noqa: F401  registers the bodies
from penstock.ops.registry import OPS
from penstock.ops.triton import launch
from penstock.runner.compile.cache_keys import find_callees, fix_cache_keys


class _TargetDriver:
    """The part of Triton's driver interface that compiling needs."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@dataclass(frozen=True)
class KernelCall:
    """A kernel and the arguments of its launch."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def weight(self) -> int:
        """Estimate the compile time by the length of the source, callees included."""
        return _source_length(self.kernel)

    def compile(self) -> None:
        made = _run(self.kernel, *self.args, warmup=True, **self.options)
        if hasattr(driver, "make_launcher"):  # some versions compile a launcher for each signature
            driver.CudaLauncher(made.src, made.metadata)


_run = JITFunction.run


def _source_length(function: Any) -> int:
    return len(function.src) + sum(_source_length(callee) for callee in find_callees(function))


def set_target(capability: tuple[int, int]) -> None:
    """Make this process compile for a GPU of that capability: ops of meta tensors take the GPU's bodies."""
    triton.runtime.driver.set_active(_TargetDriver(capability))
    launch.meta_capability = capability
    for op in OPS.values():
        for bodies in (op.bodies, op.exact_bodies):
            if "cuda" in bodies:
                bodies["meta"] = bodies["cuda"]
    fix_cache_keys()


def record_calls(work: Callable[[], object]) -> dict[tuple[str, str], KernelCall]:
    """Return the kernels that `work` launches, each once, without compiling them. `JITFunction.run` is replaced while
    it runs, and Triton's cache hook reports every kernel as compiled."""
    calls: dict[tuple[str, str], KernelCall] = {}
    launched = None

    def run(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        nonlocal launched
        launched = KernelCall(kernel, args, options)
        return _run(kernel, *args, warmup=True, **options)

    def hook(*, key: Any, **_: Any) -> bool:
        assert launched is not None
        calls.setdefault((launched.name, str(key)), launched)
        return True  # it is compiled already

    JITFunction.run = run
    knobs.runtime.jit_cache_hook = hook
    try:
        work()
    finally:
        JITFunction.run = _run
        knobs.runtime.jit_cache_hook = None
    return calls


def compile_driver() -> None:
    """Compile the library that Triton loads kernels with."""
    driver.CudaUtils()


def hash_compiler() -> None:
    """Compute Triton's hash of its own compiler, which it needs before the first cache lookup."""
    triton_key()


def cache_folder() -> str:
    return str(knobs.cache.dir)
