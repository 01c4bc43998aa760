"""Calls of kernels as they are made, as text that can be stored and compared."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from penstock.ops.cpu.runtime import library

Lines = list[str]
Flow = list[str]
TYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "f8",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
SILENT = re.compile(r"aten\.(empty|new_empty|detach|alias|lift_fresh|_unsafe_view|resolve_)")  # launch nothing


@dataclass
class Notes:
    """Calls as they are made. `flow` has, call by call, which memory each pointer is of, by order of appearance."""

    lines: Lines = field(default_factory=list)
    flow: Flow = field(default_factory=list)
    _places: dict[int, int] = field(default_factory=dict)
    _held: list[Any] = field(default_factory=list)

    def add(self, line: str, places: Sequence[int], held: Any = None) -> None:
        """Note a call; `held` is kept, so that its memory is nobody else's."""
        self._held.append(held)
        self.lines.append(line)
        known = self._places
        self.flow.append(" ".join("-" if not one else str(known.setdefault(one, len(known))) for one in places))

    def hold(self, value: Any) -> None:
        self._held.append(value)

    def note_call(self, kernel: Any, args: tuple[Any, ...]) -> None:
        """Note a CPU kernel: p for a pointer, - for a null pointer, numbers as they are."""
        words, places = [kernel.name], []
        for kind, arg in zip(kernel.argtypes, args):
            if kind is ctypes.c_void_p:
                words.append("p" if arg else "-")
                places.append(arg or 0)
            elif kind is ctypes.c_float:
                words.append(f"{arg:.6g}")
            else:
                words.append(str(int(arg)))
        self.add(" ".join(words), places)

    def launched(self, kernel: Any, args: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> None:
        """Note a Triton kernel: its grid, its arguments by name, its options."""
        named = {**dict(zip(kernel.arg_names, args)), **{k: v for k, v in options.items() if k in kernel.arg_names}}
        more = {name: value for name, value in sorted(options.items()) if name not in kernel.arg_names}
        words = [kernel.fn.__name__, "grid=" + "x".join(map(str, grid))]
        named = dict(flatten(named))
        words += [f"{name}={show(value)}" for name, value in (*named.items(), *more.items())]
        self.add(" ".join(words), [place(value) for value in named.values() if isinstance(value, Tensor)], args)

    def computed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note a function of torch's that computes or copies."""
        words = [f"torch {func}", *map(show, args), *(f"{name}={show(value)}" for name, value in kwargs.items())]
        tensors = [*tensors_of(args), *tensors_of(kwargs), *tensors_of(result)]
        self.add(" ".join([*words, "->", show(result)]), [place(one) for one in tensors])


def flatten(named: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield arguments, those that are grouped in a tuple one by one."""
    for name, value in named.items():
        if isinstance(value, tuple):
            yield from flatten({f"{name}.{index}": part for index, part in enumerate(value)})
        else:
            yield name, value


def place(x: Tensor) -> int:
    """Say which memory a tensor lies in: of the meta device too."""
    return x.untyped_storage()._cdata if x.is_meta else x.data_ptr()


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [found for part in value for found in tensors_of(part)]


def show(value: Any) -> str:
    """Write an argument down: a tensor as type[shape], with strides and offset where they are not the usual ones."""
    if isinstance(value, Tensor):
        text = f"{TYPES.get(value.dtype, value.dtype)}[{','.join(map(str, value.shape))}]"
        if not value.is_contiguous():
            text += f"@{','.join(map(str, value.stride()))}"
        return text + (f"+{value.storage_offset()}" if value.storage_offset() else "")
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, torch.dtype):
        return TYPES.get(value, str(value))
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(show, value))})"
    if hasattr(value, "block_shape"):  # a TMA descriptor: what it describes, and what it copies at a time
        shape, block = (",".join(map(str, sizes)) for sizes in (value.shape, value.block_shape))
        return f"{TYPES[value.base.dtype]}[{shape}]/{block}"
    return value.__name__ if callable(value) and hasattr(value, "__name__") else str(value)


class Listening(TorchDispatchMode):
    """Inside the block, what torch computes is noted, and every new tensor keeps its memory."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: to skip torch's compiler torch would import it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._notes.hold(result)
        if not func.is_view and not SILENT.match(str(func)):
            self._notes.computed(func, args, kwargs, result)
        return result


@contextmanager
def hear_kernels(recorder: Any) -> Iterator[None]:
    """Tell the recorder of every CPU kernel that this thread calls: `recorder.note_call(kernel, args)`."""
    library.thread.recorder = recorder
    try:
        yield
    finally:
        library.thread.recorder = None


@contextmanager
def hear_launches(notes: Notes) -> Iterator[None]:
    """Note Triton's launches instead of making them."""
    run = JITFunction.run

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        notes.launched(kernel, args, grid, options)

    JITFunction.run = note
    try:
        yield
    finally:
        JITFunction.run = run


def note_on_cpu(work: Callable[[], object]) -> Notes:
    notes = Notes()
    with Listening(notes), hear_kernels(notes):
        work()
    return notes


def note_on_gpu(work: Callable[[], object]) -> Notes:
    notes = Notes()
    with torch.inference_mode(), Listening(notes), hear_launches(notes):
        work()
    return notes
