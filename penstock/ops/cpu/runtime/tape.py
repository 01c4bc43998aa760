"""A step's kernel calls, recorded once and replayed by one native call: the CPU's CUDA graph."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.ops.cpu.runtime import library
from penstock.ops.cpu.runtime.arena import Arena, Layout
from penstock.ops.cpu.runtime.library import Kernel

R = TypeVar("R")
_aten: Any = torch.ops.aten
EMPTIES = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
# Views by name, but they bring in values (lift_fresh) or come before values are read (tolist, numpy).
VALUES = {_aten.lift_fresh.default, _aten.resolve_conj.default, _aten.resolve_neg.default}


class Tape(Generic[R]):
    """Kernel calls with all their arguments. A replay writes the same memory again, `result` included."""

    def __init__(self, calls: Sequence[tuple[Kernel, bytes]], result: R) -> None:
        self.result = result
        self.kernels = [kernel for kernel, _ in calls]
        begins, end = [], 0
        for _, words in calls:
            begins.append(end)
            end += len(words) // 8
        count = len(calls)
        self._functions = (ctypes.c_uint64 * count)(*(kernel.packed for kernel in self.kernels))
        self._begins = (ctypes.c_int64 * count)(*begins)
        self._words = (ctypes.c_uint64 * end).from_buffer_copy(b"".join(words for _, words in calls))
        assert library._library is not None
        self._replay: Callable[..., int] = library._library.penstock_replay

    def replay(self) -> R:
        """Repeat the calls on the present contents of their inputs' memory."""
        failed = self._replay(len(self.kernels), self._functions, self._begins, self._words)
        if failed:
            raise self.kernels[failed - 1].make_error()
        return self.result


@dataclass(frozen=True)
class Obstacle:
    """Names an operation of torch that a replay would leave out, so that there can be no tape."""

    name: str


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records this thread's kernel calls inside the block, and puts new tensors into the arena.

    The first thing that torch itself computes or copies becomes the obstacle to a replay.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.obstacle: Obstacle | None = None
        self.calls: list[tuple[Kernel, bytes]] = []
        self._layout = Layout(arena)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no: else torch wraps __torch_dispatch__ and imports its compiler at the first call, a second."""
        return False

    def note_call(self, kernel: Kernel, args: tuple[object, ...]) -> None:
        self.calls.append((kernel, kernel.pack(args)))

    def __enter__(self) -> Recording:
        library.thread.recorder = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        library.thread.recorder = None
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in EMPTIES and result.is_cpu:
            return self._layout.allocate(result) if result.numel() else result
        if not func.is_view or func in VALUES or not _addresses(result) <= _addresses(args):
            self.obstacle = self.obstacle or Obstacle(str(func))
        return result


def _addresses(value: Any) -> set[int]:
    """Collect the addresses of the storages of all tensors in `value`."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()}
    return {found for part in value for found in _addresses(part)} if isinstance(value, (tuple, list)) else set()


def record(function: Callable[[], R], arena: Arena) -> tuple[R, Tape[R] | Obstacle]:
    """Call the function; give its result, and its tape or the obstacle to one.

    A tape is valid as long as the tensors that existed before stay in place and `library.changes` stays the same. All
    tapes of an arena share its memory: replaying one overwrites the results of another.
    """
    recording = Recording(arena)
    with recording:
        result = function()
    return result, recording.obstacle or Tape(recording.calls, result)
