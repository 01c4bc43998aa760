"""8- and 4-bit integers: matrices rounded to GGUF's blocks at load, and such matrices on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.ops import OpTable
from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.matmul.int_product import PANEL, empty_ints, num_panels, pack_codes, pack_scales
from penstock.quant.packed import GgmlMatrix
from penstock.quant.scheme import StoredWeight

BLOCK = 32
ROWS = 4096  # per chunk
SHRINKS = (1.0, 0.95, 0.9, 0.85)  # shares of a block's range, tried for the smallest squared error


def _blocks(weight: Tensor) -> Tensor:
    """Reshape [O, C] to [O, ceil(C/32), 32] float32, the last block padded with zeros."""
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % BLOCK))
    return padded.view(len(weight), -1, BLOCK)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _divide(x: Tensor, by: float) -> Tensor:
    """Divide by a tensor: by a scalar, a GPU multiplies with the reciprocal and may differ from a CPU in the last
    bit."""
    return x / x.new_full((), by)


def _int8(blocks: Tensor) -> Tensor:
    scale = _divide(blocks.abs().amax(dim=-1, keepdim=True), 127).half()
    codes = (blocks / scale.float()).nan_to_num(0.0, 0.0, 0.0).round().clamp(-127, 127)
    return torch.cat([_bytes(scale), _bytes(codes.to(torch.int8))], dim=-1)


def _int4(blocks: Tensor) -> Tensor:
    low, high = blocks.amin(dim=-1, keepdim=True), blocks.amax(dim=-1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    best: Tensor | None = None
    for shrink in SHRINKS:
        minimum = (middle - half * shrink).half()
        scale = _divide(2 * half * shrink, 15).half()
        codes = ((blocks - minimum.float()) / scale.float()).nan_to_num(0.0, 0.0, 0.0).round().clamp(0, 15)
        error = (codes * scale.float() + minimum.float() - blocks).square().sum(dim=-1, keepdim=True)
        nibbles = codes.to(torch.uint8)
        packed = torch.cat([_bytes(scale), _bytes(minimum), nibbles[..., :16] | nibbles[..., 16:] << 4], dim=-1)
        if best is None:
            best, least = packed, error
        else:
            best, least = torch.where(error < least, packed, best), torch.minimum(error, least)
    assert best is not None
    return best


QUANTIZERS = {"int8": (8, 34, _int8), "int4": (3, 20, _int4)}  # GGUF type, bytes per block
PARTS_ON_GPU = 1 << 24  # values per chunk


def encode_rows(weight: Tensor, quantization: str, multiple: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield codes and scales of `multiple` rows at a time, rounded as by `quantize`, on the matrix's device. Codes
    [R, G, 32] (int8 codes are offset by 128), float16 scales [R, G], for int4 with minimums [R, G, 2]."""
    num_rows = max(1, PARTS_ON_GPU // weight.shape[1] // multiple) * multiple
    for first in range(0, len(weight), num_rows):
        blocks = QUANTIZERS[quantization][2](_blocks(weight[first : first + num_rows]))
        if quantization == "int8":
            yield blocks[..., 2:].contiguous() ^ 128, blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
        else:
            nibbles = blocks[..., 4:]
            yield torch.cat([nibbles & 15, nibbles >> 4], -1), blocks[..., :4].contiguous().view(torch.float16)


def quantize(weight: Tensor, quantization: str) -> GgmlMatrix:
    """Quantize a float matrix [O, C] to blocks of 32 values with a float16 scale (int8), and a minimum (int4)."""
    ggml_type, block_bytes, quantizer = QUANTIZERS[quantization]
    num_blocks = -(-weight.shape[1] // BLOCK)
    raw = torch.empty(len(weight), num_blocks * block_bytes, dtype=torch.uint8)
    for first in range(0, len(weight), ROWS):
        part = weight[first : first + ROWS]
        raw[first : first + ROWS] = quantizer(_blocks(part)).view(len(part), -1)
    return GgmlMatrix(ggml_type, np.asarray(raw.numpy()), weight.shape[1])


BITS = {"int8": 8, "int4": 4}


class Ints(StoredWeight):
    """A weight [O, C] as words and scales: the codes a CPU has, in another order."""

    def __init__(
        self, ops: OpTable, shape: Sequence[int], words: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__(ops, shape, bias)
        self.words, self.scales = words, scales
        self.dtype = dtype  # of rows

    def matmul(self, x: Tensor) -> Tensor:
        return self.ops.int_product(x, self.words, self.scales, self.num_out, Epilogue(self.bias))

    def grouped_matmul(self, x: Tensor, ids: Tensor, num_matrices: int) -> Tensor:
        return self.ops.grouped_int_product(x, self.words, self.scales, ids, num_matrices, Epilogue(self.bias))

    def rows(self, ids: Tensor) -> Tensor:
        return self.ops.int_rows(ids, self.words, self.scales, self.num_in, self.dtype)


def round_to_ints(ops: OpTable, weight: Tensor, bias: Tensor | None, quantization: str, dtype: torch.dtype) -> Ints:
    """Round a matrix as `quantize` does, on its device."""
    bits = BITS[quantization]
    words, scales = empty_ints(bits, len(weight), weight.shape[1], weight.device)
    first = 0
    for codes, each in encode_rows(weight, quantization, PANEL):
        part = slice(first, first + num_panels(len(codes)))
        words[part], scales[part] = pack_codes(codes, bits), pack_scales(each)
        first = part.stop
    return Ints(ops, weight.shape, words, scales, bias, dtype)
