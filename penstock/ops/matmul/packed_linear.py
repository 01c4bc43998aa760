"""Matrix product with a packed weight on a CPU, the activations quantized to 8 or 16 bits or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue, apply_epilogue
from penstock.ops.matmul.packed import GROUP, PackedWeight
from penstock.ops.norm import rms_norm
from penstock.ops.registry import op

LIMITS = {8: 127.0, 16: 127.0 * 256.0}  # largest integer of a quantized activation


def quantize_rows(x: Tensor, x_bits: int) -> Tensor:
    """Round x[T, C] in groups of 32 to a scale times integers: of 8 bits around the middle of their range, of 16 around
    zero. An incomplete last group is centered on zero."""
    num_rows, width = x.shape
    num_groups = -(-width // GROUP)
    groups = torch.nn.functional.pad(x, (0, -width % GROUP)).view(num_rows, num_groups, GROUP)
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    middle, reach = (low + high) / 2, (high - low) / 2
    zero = slice(0 if x_bits == 16 else width // GROUP, num_groups)
    middle[:, zero], reach[:, zero] = 0.0, groups[:, zero].abs().amax(dim=-1, keepdim=True)
    limit = LIMITS[x_bits]
    codes = torch.round((groups - middle) * torch.where(reach > 1e-30, limit / reach, 0.0))
    return (codes * (reach / limit) + middle).view(num_rows, num_groups * GROUP)[:, :width]


@op(tolerance={torch.float32: 5e-5})
def packed_linear(
    x: Tensor,
    parts: Sequence[PackedWeight],
    x_bits: int,
    epilogue: Epilogue = NO_EPILOGUE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Apply the epilogue to x[T, C] · weightᵀ → [T, O], gated [T, O/2]; the weight is its parts one after the other.

    With norm[C], rows of x are RMS-normed first. Activations are quantized to `x_bits` bits, 8 or 16, and multiplied
    exactly within a group of 32; with 0 they stay float32.
    """
    x = x.float() if norm is None else rms_norm.reference(x.float(), norm, eps)
    y = (quantize_rows(x, x_bits) if x_bits else x) @ torch.cat(
        [part.unpack(integers=bool(x_bits)) for part in parts]
    ).T
    return apply_epilogue(y, epilogue)
