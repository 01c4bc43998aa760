"""Products of many rows by a kernel of cuBLASLt's that torch, which takes the one named first, does not take.

The library is the one that torch has loaded, by way of ctypes.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

MANY_ROWS, STEP = 4096, 1024  # kernels are looked for once in so many rows
MUCH = 1 << 36  # multiplications: what is less would gain less time than the host takes to ask
TILE = 201  # the library's name for 176 outputs by 128 rows
FLOAT32, COMPUTE_FLOAT32 = 0, 68  # its names, too, as all of these
TYPES = {torch.float16: 2, torch.bfloat16: 14}
TRANSPOSE_A = 3  # of a product
MOST_WORKSPACE, LEAST_ALIGNMENTS = 1, (5, 6, 7, 8)  # of a wish
TILE_OF_KERNEL = 1
WORKSPACE = 32 << 20  # bytes at most
ALIGNMENT = 16  # bytes at least
MOST_KERNELS = 16
ONE, ZERO = c_float(1.0), c_float(0.0)


class _Named(ctypes.Structure):
    """A kernel as the library names it."""

    _fields_ = [
        ("kernel", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class Size(NamedTuple):
    """Of x[num_rows, width] · weight[num_out, width]ᵀ."""

    num_rows: int
    num_out: int
    width: int
    dtype: torch.dtype
    device: torch.device


@lru_cache(maxsize=1)
def _library() -> Any:
    """None where torch has loaded none."""
    if torch.version.cuda is None:
        return None
    try:
        found = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
        found.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
    except (OSError, AttributeError):
        return None
    return found


def _call(name: str, *values: Any) -> None:
    status = getattr(_library(), name)(*values)
    if status:
        raise RuntimeError(f"{name} failed with status {status}")


@lru_cache(maxsize=8)
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", byref(handle))
    return handle


@lru_cache(maxsize=8)
def _workspace(device: torch.device, stream: int) -> Tensor:
    """What is launched on one stream runs one after the other, and may use the same."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


class _Product:
    """What the library has to know of a product. Its matrices are ours turned over: it stores columns."""

    def __init__(self, size: Size) -> None:
        self.device, self._library = size.device, _library()
        self._layouts = [
            self._layout(size, size.width, size.num_out),
            self._layout(size, size.width, size.num_rows),
            self._layout(size, size.num_out, size.num_rows),
        ]
        self._how = c_void_p()
        _call("cublasLtMatmulDescCreate", byref(self._how), COMPUTE_FLOAT32, FLOAT32)
        turned = c_int32(1)
        _call("cublasLtMatmulDescSetAttribute", self._how, TRANSPOSE_A, byref(turned), c_size_t(4))

    @staticmethod
    def _layout(size: Size, rows: int, columns: int) -> c_void_p:
        made = c_void_p()
        _call(
            "cublasLtMatrixLayoutCreate",
            byref(made),
            TYPES[size.dtype],
            c_uint64(rows),
            c_uint64(columns),
            c_int64(rows),
        )
        return made

    def __del__(self) -> None:
        for layout in getattr(self, "_layouts", ()):
            self._library.cublasLtMatrixLayoutDestroy(layout)
        if hasattr(self, "_how"):
            self._library.cublasLtMatmulDescDestroy(self._how)

    def kernel(self) -> Any:
        """The one that makes such tiles; None if the library does not name it."""
        weight, x, out = self._layouts
        wish, found, count = c_void_p(), (_Named * MOST_KERNELS)(), c_int()
        _call("cublasLtMatmulPreferenceCreate", byref(wish))
        try:
            for name, value in [
                (MOST_WORKSPACE, c_uint64(WORKSPACE)),
                *((name, c_uint32(ALIGNMENT)) for name in LEAST_ALIGNMENTS),
            ]:
                _call("cublasLtMatmulPreferenceSetAttribute", wish, name, byref(value), c_size_t(ctypes.sizeof(value)))
            _call(
                "cublasLtMatmulAlgoGetHeuristic",
                _handle(self.device),
                self._how,
                weight,
                x,
                out,
                out,
                wish,
                MOST_KERNELS,
                found,
                byref(count),
            )
        finally:
            self._library.cublasLtMatmulPreferenceDestroy(wish)
        return next((one.kernel for one in found[: count.value] if one.status == 0 and _tile(one.kernel) == TILE), None)

    def run(self, kernel: Any, x: Tensor, weight: Tensor, out: Tensor) -> bool:
        """Whether that kernel could."""
        of_weight, of_x, of_out = self._layouts
        stream = torch._C._cuda_getCurrentRawStream(x.get_device())
        status: int = self._library.cublasLtMatmul(
            _handle(self.device),
            self._how,
            ctypes.addressof(ONE),
            weight.data_ptr(),
            of_weight,
            x.data_ptr(),
            of_x,
            ctypes.addressof(ZERO),
            out.data_ptr(),
            of_out,
            out.data_ptr(),
            of_out,
            ctypes.addressof(kernel),
            _workspace(self.device, stream).data_ptr(),
            WORKSPACE,
            stream,
        )
        return status == 0


def _tile(kernel: Any) -> int:
    value, written = c_uint32(), c_size_t()
    _call(
        "cublasLtMatmulAlgoConfigGetAttribute", byref(kernel), TILE_OF_KERNEL, byref(value), c_size_t(4), byref(written)
    )
    return value.value


@lru_cache(maxsize=1024)
def _product(size: Size) -> _Product:
    return _Product(size)


@lru_cache(maxsize=1024)
def kernel_for(size: Size) -> Any:
    """None where torch's is to be taken."""
    with suppress(RuntimeError):
        return None if _library() is None else _product(size).kernel()
    return None


def _suits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.shape[0] >= MANY_ROWS
        and x.shape[0] * weight.numel() >= MUCH
        and x.is_cuda
        and x.dtype in TYPES
        and weight.dtype == x.dtype
    ) and all(one.is_contiguous() and not one.data_ptr() % ALIGNMENT for one in (x, weight))


def multiplied(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ, of many rows with tiles of 176 outputs by 128 rows where the library has them: on a busy H200 they
    take 2 to 5 % less time than those it would rather take (decision 0017)."""
    if _suits(x, weight):
        size = Size(x.shape[0], weight.shape[0], weight.shape[1], x.dtype, x.device)
        kernel = kernel_for(size._replace(num_rows=-(-size.num_rows // STEP) * STEP))
        if kernel is not None:
            out = torch.empty((size.num_rows, size.num_out), dtype=x.dtype, device=x.device)
            if _product(size).run(kernel, x, weight, out):
                return out
    return torch.mm(x, weight.t())
