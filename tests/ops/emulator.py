"""Kernels compiled for another processor by the package's own build, and called there under an emulator."""

from __future__ import annotations

import ctypes
import fcntl
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.ops import cpu
from penstock.ops.cpu.runtime.library import KERNELS, Kernel

ROOT = Path(__file__).parents[2]
SOURCE, BUILD = ROOT / "tests/ops/neon", ROOT / "build/neon"
COMPILER = "aarch64-linux-gnu-g++"


def _found(*names: str) -> str | None:
    """The first of these programs there is, beside this Python or elsewhere."""
    beside = str(Path(sys.executable).parent)
    return next((found for name in names if (found := shutil.which(name, path=beside) or shutil.which(name))), None)


def missing() -> str | None:
    """Why nothing can be emulated here; None if it can."""
    if platform.machine() in ("aarch64", "arm64"):
        return "this processor runs the NEON path itself: test_bodies.py does"
    if _found(COMPILER) is None:
        return f"{COMPILER} is not installed (Debian or Ubuntu: apt install g++-aarch64-linux-gnu)"
    if _found("qemu-aarch64-static", "qemu-aarch64") is None:
        return "qemu-aarch64 is not installed (Debian or Ubuntu: apt install qemu-user-static)"
    return None if _found("cmake") else "cmake is not installed"


def build() -> None:
    """Bring the library and the driver up to date; processes that test side by side take turns."""
    BUILD.mkdir(parents=True, exist_ok=True)
    cmake = _found("cmake") or "cmake"
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (BUILD / "CMakeCache.txt").exists():
            ninja = _found("ninja")
            generator = [] if ninja is None else ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
            _run(
                [
                    cmake,
                    "-S",
                    str(SOURCE),
                    "-B",
                    str(BUILD),
                    *generator,
                    "-DCMAKE_BUILD_TYPE=Release",
                    "-DCMAKE_SYSTEM_NAME=Linux",
                    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
                    f"-DCMAKE_CXX_COMPILER={COMPILER}",
                ]
            )
        _run([cmake, "--build", str(BUILD), "--parallel", "2"])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def _driver(processor: str) -> list[str]:
    libraries = Path(_run([COMPILER, "-print-file-name=libc.so.6"]).strip()).resolve().parents[1]
    emulator = _found("qemu-aarch64-static", "qemu-aarch64") or "qemu-aarch64"
    return [
        emulator,
        "-L",
        str(libraries),
        "-cpu",
        processor,
        str(BUILD / "driver"),
        str(BUILD / "kernels/_kernels.so"),
    ]


def paths_of(processor: str) -> list[str]:
    return _run([*_driver(processor), "paths"]).split()


class Regions:
    """How much memory lies around the addresses that bindings take."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def note(self, start: int, size: int) -> None:
        """What was known to lie here is gone."""
        for other, length in list(self._sizes.items()):
            if other < start + size and start < other + length:
                del self._sizes[other]
        self._sizes[start] = size

    def around(self, address: int) -> tuple[int, int]:
        for start, size in self._sizes.items():
            if start <= address < start + size:
                return start, size
        raise KeyError(f"nobody asked for the address of a tensor around {address:#x}")


class Emulator:
    """A processor that waits for kernel calls on one path."""

    def __init__(self, processor: str, path: str, threads: int = 2) -> None:
        self.path = path
        self.called: set[str] = set()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [*_driver(processor), "serve", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(60)
        self._errors.close()

    def call(self, kernel: Kernel, regions: Regions, *args: object) -> int:
        """Send the call with all the memory it can reach, and take the memory back as the kernel left it."""
        self.called.add(kernel.name)
        offsets, pointers, buffers = list(args), [], dict[tuple[int, int], int]()
        for place, (kind, arg) in enumerate(zip(kernel.argtypes, args)):
            if kind is ctypes.c_void_p and arg:
                assert isinstance(arg, int)
                region = regions.around(arg)
                offsets[place] = arg - region[0]
                pointers.append((place, buffers.setdefault(region, len(buffers))))
        before = [ctypes.string_at(start, size) for start, size in buffers]
        symbol, words = f"penstock_{kernel.name}_{self.path}_packed".encode(), kernel.pack(tuple(offsets))
        request = [struct.pack("<Q", len(symbol)), symbol, struct.pack("<Q", len(buffers))]
        for (start, size), data in zip(buffers, before):
            request += [struct.pack("<QQ", size, start % 64), data]
        request += [struct.pack("<Q", len(words) // 8), words, struct.pack("<Q", len(pointers))]
        request += [struct.pack("<QQ", *pointer) for pointer in pointers]
        result, after = self._exchange(b"".join(request), [size for _, size in buffers])
        for (start, size), old, new in zip(buffers, before, after):
            if new != old:
                ctypes.memmove(start, new, size)
        return result

    def _exchange(self, request: bytes, sizes: Sequence[int]) -> tuple[int, list[bytes]]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(request)
            stdin.flush()
        except BrokenPipeError:
            raise self._death() from None
        answer = stdout.read(8 + sum(sizes))
        if len(answer) < 8 + sum(sizes):
            raise self._death()
        buffers, at = [], 8
        for size in sizes:
            buffers.append(answer[at : at + size])
            at += size
        return struct.unpack("<q", answer[:8])[0], buffers

    def _death(self) -> AssertionError:
        code = self._process.wait(60)
        self._errors.seek(0)
        return AssertionError(f"the driver ended with status {code}: {self._errors.read().decode(errors='replace')}")


@contextmanager
def emulated(emulator: Emulator) -> Iterator[Regions]:
    """Inside the block bindings do what they always do, but their kernels run in the emulator."""
    regions, address = Regions(), torch.Tensor.data_ptr

    def noted(tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        regions.note(storage.data_ptr(), storage.nbytes())
        return address(tensor)

    with cpu.override_path(cpu.paths()[-1]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "data_ptr", noted)
        for kernel in KERNELS:
            patch.setattr(kernel, "function", partial(emulator.call, kernel, regions))
        yield regions
