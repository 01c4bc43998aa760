"""Load the compiled kernels, choose the path among them, and call them by ctypes."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from penstock.errors import InvalidConfig
from penstock.ops.registry import REFERENCE_ONLY

PATHS = ("reference", "generic", "avx2", "avx512", "neon")
KERNELS: list[Kernel] = []
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in number.h
_ARGUMENTS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}
_WORDS = {"p": "Q", "n": "q", "i": "i4x", "f": "f4x"}  # as call_packed in simd.h reads them


class CallRecorder(Protocol):
    def note_call(self, kernel: Kernel, args: tuple[object, ...]) -> None:
        """Take note of a call that has just been made."""


class ThreadState(threading.local):
    """Holds the recorder of each thread's kernel calls."""

    recorder: CallRecorder | None = None


class Kernel:
    """One C function, compiled for the path in use; `signature` has a letter per argument.

    p pointer, n 64-bit integer, i 32-bit integer, f float. ctypes releases the interpreter lock during a call.
    """

    def __init__(self, name: str, signature: str) -> None:
        self.name, self.signature = name, signature
        self.argtypes = [_ARGUMENTS[letter] for letter in signature]
        self.words = struct.Struct("<" + "".join(_WORDS[letter] for letter in signature))
        self.function: Callable[..., int] = self._refuse
        self.packed = 0  # address of the variant that takes its arguments as words
        if _path != "reference":
            self.bind(_path)
        KERNELS.append(self)

    def _refuse(self, *args: object) -> int:
        raise RuntimeError(f"kernel {self.name} was called on the reference path")

    def bind(self, path: str) -> None:
        """Call the variant of this path from now on."""
        if path == "reference":
            self.function, self.packed = self._refuse, 0
            return
        symbol = f"penstock_{self.name}_{path}"
        try:
            function, packed, signature = (getattr(_library, symbol + end) for end in ("", "_packed", "_signature"))
        except AttributeError as error:
            raise RuntimeError(
                f"the compiled kernels are older than this code, run pip install . again: {error}"
            ) from None
        signature.restype = ctypes.c_char_p
        self.compare(signature().decode())
        function.argtypes, function.restype = self.argtypes, ctypes.c_int32
        self.function = function
        self.packed = ctypes.cast(packed, ctypes.c_void_p).value or 0

    def compare(self, compiled: str) -> None:
        """Refuse letters that differ from those of the C++ function."""
        for place, (bound, real) in enumerate(zip_longest(self.signature, compiled, fillvalue="nothing"), start=1):
            if bound != real:
                raise TypeError(
                    f"kernel {self.name}, argument {place}: the binding says {bound}, the C++ function {real}; "
                    f'correct Kernel("{self.name}", …), or run pip install . if the compiled kernels are older'
                )

    def __call__(self, *args: object) -> None:
        if self.function(*args):
            raise self.make_error()
        if thread.recorder is not None:
            thread.recorder.note_call(self, args)

    def make_error(self) -> Exception:
        return IndexError(f"{self.name}: an index points outside the tensor it selects from")

    def pack(self, args: tuple[object, ...]) -> bytes:
        """Pack the arguments into 64-bit words, as a tape holds them."""
        return self.words.pack(*(0 if arg is None else arg for arg in args))


def _load() -> ctypes.CDLL | None:
    # Named like an extension module so that the import system finds it, in a plain and in an editable install.
    spec = importlib.util.find_spec("penstock.ops.cpu._kernels")
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:
        return None
    library.penstock_paths.restype = ctypes.c_char_p
    library.penstock_replay.restype = ctypes.c_int64
    library.penstock_replay.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return library


def paths() -> tuple[str, ...]:
    """List the paths this machine can run, the best one last."""
    if _library is None:
        return ("reference",)
    return ("reference", *_library.penstock_paths().decode().split())


def path() -> str:
    """Name the path in use, one of PATHS."""
    return _path


def use_path(wanted: str) -> None:
    """Switch to this path; results differ between paths in the last bits."""
    global _path, changes
    if wanted not in PATHS:
        raise InvalidConfig(f"PENSTOCK_CPU={wanted!r} is not known: use one of {', '.join(PATHS)}, or leave it unset")
    if wanted not in paths():
        reason = "the compiled kernels are missing, run pip install ." if _library is None else "this CPU lacks it"
        raise InvalidConfig(f"PENSTOCK_CPU={wanted} cannot be used: {reason} (possible here: {', '.join(paths())})")
    _path = wanted
    changes += 1
    for kernel in KERNELS:
        kernel.bind(wanted)
    if wanted == "reference":
        REFERENCE_ONLY.add("cpu")
    else:
        REFERENCE_ONLY.discard("cpu")


@contextmanager
def override_path(wanted: str) -> Iterator[None]:
    """Use this path inside the block and the former one after it."""
    former = path()
    use_path(wanted)
    try:
        yield
    finally:
        use_path(former)


def check_float32(name: str, x: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise TypeError(f"{name} is {x.dtype}: on CPU activations and their parameters are float32")
    return x


def as_rows(name: str, x: Tensor) -> Tensor:
    """Give float32 x with everything after dimension 0 contiguous, copied only if needed."""
    check_float32(name, x)
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:])):
        if stride != expected and size != 1:
            return x.contiguous()
        expected *= size
    return x


def as_integers(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Give x as contiguous integers of this dtype, copied only if needed."""
    return x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()


def empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


thread = ThreadState()
changes = 0  # of path or number of threads; each makes earlier tapes invalid
_library = _load()
_path = "reference"
use_path(os.environ.get("PENSTOCK_CPU") or paths()[-1])
