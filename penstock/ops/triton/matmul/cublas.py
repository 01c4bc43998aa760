"""GEMMs by cuBLASLt kernels that torch does not choose: a faster one for many rows, and those that do not split K.

The library is the one that torch has loaded, called through ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.ops.triton.tuning import CHOSEN_ROWS_STEP, MIN_CHOSEN_MACS, MIN_CHOSEN_ROWS

# cuBLASLt's enum values
TILE = 201  # 176 outputs by 128 rows
FLOAT32, COMPUTE_FLOAT32 = 0, 68
TYPES = {torch.float16: 2, torch.bfloat16: 14}
TRANSPOSE_A = 3  # of a matmul descriptor
MAX_WORKSPACE, REDUCTIONS, MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # of a preference
ALGORITHM_ID, TILE_ID, NUM_SPLITS = 0, 1, 2  # of an algorithm
HOPPER_ALGORITHM = 66  # the kernels for compute capability 9.x; others that the library lists there are far slower

WORKSPACE_BYTES = 32 << 20
ALIGNMENT = 16  # bytes
MAX_ALGORITHMS = 16
UNSPLIT_ROWS = (0, 8, 16)  # more than the product has, for which the heuristic is asked
ONE, ZERO = c_float(1.0), c_float(0.0)


class _HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class GemmSize(NamedTuple):
    """The shapes of x[num_rows, width] · weight[num_out, width]ᵀ."""

    num_rows: int
    num_out: int
    width: int
    dtype: torch.dtype
    device: torch.device


@lru_cache(maxsize=1)
def _library() -> Any:
    """Return torch's cuBLASLt, or None if it has none."""
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
    """Return the workspace of a stream; its kernels run one after the other and share it."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class _Matmul:
    """The library's descriptors of a product. It is column-major: its matrices are ours transposed."""

    def __init__(self, size: GemmSize) -> None:
        self.device, self._library = size.device, _library()
        self._layouts = [
            self._layout(size, size.width, size.num_out),
            self._layout(size, size.width, size.num_rows),
            self._layout(size, size.num_out, size.num_rows),
        ]
        self._descriptor = c_void_p()
        _call("cublasLtMatmulDescCreate", byref(self._descriptor), COMPUTE_FLOAT32, FLOAT32)
        transposed = c_int32(1)
        _call("cublasLtMatmulDescSetAttribute", self._descriptor, TRANSPOSE_A, byref(transposed), c_size_t(4))

    @staticmethod
    def _layout(size: GemmSize, rows: int, columns: int) -> c_void_p:
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
        if hasattr(self, "_descriptor"):
            self._library.cublasLtMatmulDescDestroy(self._descriptor)

    def list_algorithms(self, can_split: bool = True) -> list[Any]:
        """Return the heuristic's algorithms, the best first; those that split K only if `can_split`."""
        weight, x, out = self._layouts
        preference, found, count = c_void_p(), (_HeuristicResult * MAX_ALGORITHMS)(), c_int()
        _call("cublasLtMatmulPreferenceCreate", byref(preference))
        try:
            for name, value in [
                (MAX_WORKSPACE, c_uint64(WORKSPACE_BYTES)),
                *((name, c_uint32(ALIGNMENT)) for name in MIN_ALIGNMENTS),
                *([] if can_split else [(REDUCTIONS, c_uint32(0))]),
            ]:
                _call(
                    "cublasLtMatmulPreferenceSetAttribute",
                    preference,
                    name,
                    byref(value),
                    c_size_t(ctypes.sizeof(value)),
                )
            _call(
                "cublasLtMatmulAlgoGetHeuristic",
                _handle(self.device),
                self._descriptor,
                weight,
                x,
                out,
                out,
                preference,
                MAX_ALGORITHMS,
                found,
                byref(count),
            )
        finally:
            self._library.cublasLtMatmulPreferenceDestroy(preference)
        return [result.algorithm for result in found[: count.value] if result.status == 0]

    def run(self, algorithm: Any, x: Tensor, weight: Tensor, out: Tensor, adds: bool = False) -> bool:
        """Multiply with this algorithm, and add what `out` holds if `adds`; return False if the library refuses."""
        of_weight, of_x, of_out = self._layouts
        stream = torch._C._cuda_getCurrentRawStream(x.get_device())
        status: int = self._library.cublasLtMatmul(
            _handle(self.device),
            self._descriptor,
            ctypes.addressof(ONE),
            weight.data_ptr(),
            of_weight,
            x.data_ptr(),
            of_x,
            ctypes.addressof(ONE if adds else ZERO),
            out.data_ptr(),
            of_out,
            out.data_ptr(),
            of_out,
            ctypes.addressof(algorithm),
            _workspace(self.device, stream).data_ptr(),
            WORKSPACE_BYTES,
            stream,
        )
        return status == 0


def _read(algorithm: Any, attribute: int) -> int:
    value, written = c_uint32(), c_size_t()
    _call(
        "cublasLtMatmulAlgoConfigGetAttribute", byref(algorithm), attribute, byref(value), c_size_t(4), byref(written)
    )
    return value.value


@lru_cache(maxsize=1024)
def _matmul(size: GemmSize) -> _Matmul:
    return _Matmul(size)


@lru_cache(maxsize=1024)
def find_algorithm(size: GemmSize) -> Any:
    """Return the algorithm with TILE for this size, or None to use torch's choice."""
    with suppress(RuntimeError):
        listed = [] if _library() is None else _matmul(size).list_algorithms()
        return next((algorithm for algorithm in listed if _read(algorithm, TILE_ID) == TILE), None)
    return None


def _can_take(*tensors: Tensor) -> bool:
    """Return True if cuBLASLt takes these tensors as they are."""
    return all(
        one.is_cuda
        and one.dtype == tensors[0].dtype in TYPES
        and one.is_contiguous()
        and not one.data_ptr() % ALIGNMENT
        and not one.shape[1] * one.dtype.itemsize % ALIGNMENT
        for one in tensors
    )


def _can_choose(x: Tensor, weight: Tensor) -> bool:
    is_large = x.shape[0] >= MIN_CHOSEN_ROWS and x.shape[0] * weight.numel() >= MIN_CHOSEN_MACS
    return is_large and _can_take(x, weight)


def gemm(x: Tensor, weight: Tensor) -> Tensor:
    """Return x · weightᵀ; for many rows with tiles of 176 outputs by 128 rows if cuBLASLt has them, which are 2 to 5 %
    faster on an H200 (decision 0017)."""
    if _can_choose(x, weight):
        size = GemmSize(x.shape[0], weight.shape[0], weight.shape[1], x.dtype, x.device)
        algorithm = find_algorithm(size._replace(num_rows=-(-size.num_rows // CHOSEN_ROWS_STEP) * CHOSEN_ROWS_STEP))
        if algorithm is not None:
            out = torch.empty((size.num_rows, size.num_out), dtype=x.dtype, device=x.device)
            if _matmul(size).run(algorithm, x, weight, out):
                return out
    return torch.mm(x, weight.t())


def list_unsplit(size: GemmSize) -> Iterator[Any]:
    """List Hopper's algorithms that sum each output in one chain over K. For some numbers of rows, such as 64, the
    heuristic knows none of them, but does for a few rows more."""
    if _library() is None:
        return
    with suppress(RuntimeError):
        for more in UNSPLIT_ROWS:
            for algorithm in _matmul(size._replace(num_rows=size.num_rows + more)).list_algorithms(can_split=False):
                if _read(algorithm, ALGORITHM_ID) == HOPPER_ALGORITHM and _read(algorithm, NUM_SPLITS) <= 1:
                    yield algorithm


def multiply(algorithm: Any, x: Tensor, weight: Tensor, out: Tensor, adds: bool) -> bool:
    """Write x · weightᵀ, plus what `out` holds if `adds`, to `out`; return False if it cannot be done."""
    size = GemmSize(x.shape[0], weight.shape[0], weight.shape[1], x.dtype, x.device)
    return _can_take(x, weight, out) and _matmul(size).run(algorithm, x, weight, out, adds)
