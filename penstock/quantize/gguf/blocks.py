"""Encode matrices into GGUF blocks: float32 [O, C] to bytes [O, B]. The way back is `penstock/quant/gguf.py`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import InvalidConfig
from penstock.quant.gguf import GGML_TYPES
from penstock.quantize.gguf import kquants
from penstock.quantize.gguf.fits import divide, fit_affine, fit_symmetric

Bytes = NDArray[np.uint8]
Encode = Callable[[Tensor, Tensor | None], Bytes]  # blocks [N, size], importance [N, size] → bytes [N, B]
VALUES_AT_ONCE = 1 << 20


def _f16(x: Tensor) -> Bytes:
    return x.half().numpy().view(np.uint8).reshape(len(x), 2)


def _halves(codes: Bytes) -> Bytes:
    """Pack 4-bit codes [N, 32]: the first sixteen lie in the low halves."""
    packed: Bytes = codes[:, :16] | codes[:, 16:] << np.uint8(4)
    return packed


def _weigh(x: Tensor, given: Tensor) -> Tensor:
    return given * (x.square().mean(1, keepdim=True) + x * x).sqrt()


def _fit_by_largest(x: Tensor, given: Tensor | None, top: int) -> tuple[Tensor, Bytes]:
    """Scale by the largest value, which takes −top, or by search → d [N], codes + top [N, 32]."""
    extreme = x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0]
    d = extreme / -top if given is None else fit_symmetric(x, _weigh(x, given), top).half().float()
    inverse = divide(torch.ones_like(d), d)
    codes = (x * inverse[:, None] + (top + 0.5)).floor().clamp(0, 2 * top - 1)
    return d, codes.to(torch.uint8).numpy()


def _fit_affine(x: Tensor, given: Tensor | None, top: int) -> tuple[Tensor, Tensor, Bytes]:
    """Span the values, or search → d [N], minimum [N], codes [N, 32]."""
    if given is None:
        minimum = x.amin(1)
        d = (x.amax(1) - minimum) / top
    else:
        d, minimum = (part.half().float() for part in fit_affine(x, _weigh(x, given), top))
    codes = ((x - minimum[:, None]) * divide(torch.ones_like(d), d)[:, None] + 0.5).floor().clamp(0, top)
    return d, minimum, codes.to(torch.uint8).numpy()


def _fifth(codes: Bytes) -> Bytes:
    return np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")


def q4_0(x: Tensor, given: Tensor | None) -> Bytes:
    d, codes = _fit_by_largest(x, given, 8)
    return np.concatenate([_f16(d), _halves(codes)], axis=1)


def q4_1(x: Tensor, given: Tensor | None) -> Bytes:
    d, minimum, codes = _fit_affine(x, given, 15)
    return np.concatenate([_f16(d), _f16(minimum), _halves(codes)], axis=1)


def q5_0(x: Tensor, given: Tensor | None) -> Bytes:
    d, codes = _fit_by_largest(x, given, 16)
    return np.concatenate([_f16(d), _fifth(codes), _halves(codes & np.uint8(15))], axis=1)


def q5_1(x: Tensor, given: Tensor | None) -> Bytes:
    d, minimum, codes = _fit_affine(x, given, 31)
    return np.concatenate([_f16(d), _f16(minimum), _fifth(codes), _halves(codes & np.uint8(15))], axis=1)


def q8_0(x: Tensor, given: Tensor | None) -> Bytes:
    d = x.abs().amax(1) / 127
    scaled = x * divide(torch.ones_like(d), d)[:, None]
    codes = (scaled.abs() + 0.5).floor() * scaled.sign()  # halves away from zero
    return np.concatenate([_f16(d), codes.to(torch.int8).numpy().view(np.uint8)], axis=1)


def _raw(dtype: torch.dtype) -> Encode:
    def encode(x: Tensor, given: Tensor | None) -> Bytes:
        stored = x.to(dtype).contiguous()
        return stored.view(torch.uint8).numpy().reshape(len(x), -1)

    return encode


ENCODERS: dict[str, Encode] = {
    "F32": _raw(torch.float32),
    "F16": _raw(torch.float16),
    "BF16": _raw(torch.bfloat16),
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    **kquants.ENCODERS,
}
TYPES = {kind.name: number for number, kind in GGML_TYPES.items()}


def encode(weight: Tensor, name: str, importance: Tensor | None = None) -> Bytes:
    """Encode weight[O, C] as a GGUF type; errors at input c cost importance[c] → bytes [O, B]."""
    kind = GGML_TYPES[TYPES[name]]
    size, width = kind.block_size, weight.shape[-1]
    if width % size:
        raise InvalidConfig(f"{name} has blocks of {size} values, which rows of {width} do not divide into")
    blocks = weight.detach().float().reshape(-1, size)
    per_row = width // size
    given = None if importance is None else importance.float().clamp(min=0).reshape(per_row, size)
    raw = np.empty((len(blocks), kind.block_bytes), dtype=np.uint8)
    step = max(1, VALUES_AT_ONCE // size)
    for first in range(0, len(blocks), step):
        part = blocks[first : first + step]
        weights = None if given is None else given[torch.arange(first, first + len(part)) % per_row]
        raw[first : first + len(part)] = ENCODERS[name](part, weights)
    return raw.reshape(*weight.shape[:-1], -1)
