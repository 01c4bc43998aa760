"""Quantizing at load: float matrices to the blocks of GGUF's Q8_0 and Q4_1, which are then packed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from penstock.quant.packed import Stored

BLOCK = 32
ROWS = 4096  # worked on at a time
SHRINKS = (1.0, 0.95, 0.9, 0.85)  # of a block's range, tried for the smallest squared error


def _blocks(weight: Tensor) -> Tensor:
    """[O, C] → [O, ceil(C/32), 32] float32, the last block filled up with zeros."""
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % BLOCK))
    return padded.view(len(weight), -1, BLOCK)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _divided(x: Tensor, by: float) -> Tensor:
    """By a tensor: of a plain number a GPU takes the reciprocal, and may get another last bit than a CPU."""
    return x / x.new_full((), by)


def _int8(blocks: Tensor) -> Tensor:
    scale = _divided(blocks.abs().amax(dim=-1, keepdim=True), 127).half()
    codes = (blocks / scale.float()).nan_to_num(0.0, 0.0, 0.0).round().clamp(-127, 127)
    return torch.cat([_bytes(scale), _bytes(codes.to(torch.int8))], dim=-1)


def _int4(blocks: Tensor) -> Tensor:
    low, high = blocks.amin(dim=-1, keepdim=True), blocks.amax(dim=-1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    best: Tensor | None = None
    for shrink in SHRINKS:
        minimum = (middle - half * shrink).half()
        scale = _divided(2 * half * shrink, 15).half()
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


QUANTIZERS = {"int8": (8, 34, _int8), "int4": (3, 20, _int4)}  # GGUF type, bytes of a block
PARTS_ON_GPU = 1 << 24  # values worked on at a time


def coded(weight: Tensor, quantization: str, multiple: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of a float matrix after others, a multiple of so many at a time, rounded as by `quantize`, but where
    the matrix lies: codes [R, G, 32], of 8 bits 128 too large, and float16 scales [R, G], of 4 bits with minimums
    [R, G, 2]."""
    num_rows = max(1, PARTS_ON_GPU // weight.shape[1] // multiple) * multiple
    for first in range(0, len(weight), num_rows):
        blocks = QUANTIZERS[quantization][2](_blocks(weight[first : first + num_rows]))
        if quantization == "int8":
            yield blocks[..., 2:].contiguous() ^ 128, blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
        else:
            nibbles = blocks[..., 4:]
            yield torch.cat([nibbles & 15, nibbles >> 4], -1), blocks[..., :4].contiguous().view(torch.float16)


def quantize(weight: Tensor, quantization: str) -> Stored:
    """A float matrix [O, C] as blocks of 32 values with a float16 scale (int8), and a minimum too (int4)."""
    ggml_type, block_bytes, quantizer = QUANTIZERS[quantization]
    num_blocks = -(-weight.shape[1] // BLOCK)
    raw = torch.empty(len(weight), num_blocks * block_bytes, dtype=torch.uint8)
    for first in range(0, len(weight), ROWS):
        part = weight[first : first + ROWS]
        raw[first : first + ROWS] = quantizer(_blocks(part)).view(len(part), -1)
    return Stored(ggml_type, np.asarray(raw.numpy()), weight.shape[1])
