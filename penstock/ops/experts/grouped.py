"""Matrix products in which each row names its matrix, of a stack of E equal ones held as one [E · O, C]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue, apply_epilogue
from penstock.ops.matmul.linear import unpack_panels
from penstock.ops.matmul.packed import PackedWeight
from penstock.ops.matmul.packed_linear import quantize_rows
from penstock.ops.registry import op


def multiply_groups(x: Tensor, stack: Tensor, ids: Tensor, epilogue: Epilogue) -> Tensor:
    """Apply the epilogue to x · stack[id]ᵀ for stack[E, O, C] in plain PyTorch: the reference of every body."""
    num_tokens, num_chosen = ids.shape
    num_out = epilogue.num_results(stack.shape[1])
    rows = x if x.dim() == 3 else x[:, None].expand(-1, num_chosen, -1)
    y = torch.zeros(num_tokens, num_chosen, num_out)
    for expert in sorted({one for one in ids.flatten().tolist() if one >= 0}):
        at = ids == expert
        bias = None if epilogue.bias is None else epilogue.bias.view(len(stack), -1)[expert]
        y[at] = apply_epilogue(rows[at] @ stack[expert].T, epilogue._replace(bias=bias))
    return y


@op(tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3})
def grouped_matmul(
    x: Tensor, panels: Tensor, ids: Tensor, num_matrices: int, epilogue: Epilogue = NO_EPILOGUE
) -> Tensor:
    """Apply the epilogue to x[t] · stack[ids[t, k]]ᵀ → [T, K, O], gated [T, K, O/2], for x[T, C], or x[T, K, C] for one
    row each. An id of −1 gives zeros. The bias is [E · O]; there is no residual."""
    stack = unpack_panels(panels, len(panels) * panels.shape[2]).float()
    return multiply_groups(x.float(), stack.view(num_matrices, -1, stack.shape[1]), ids, epilogue)


@op(tolerance={torch.float32: 5e-5})
def grouped_packed_matmul(
    x: Tensor,
    parts: Sequence[PackedWeight],
    ids: Tensor,
    num_matrices: int,
    x_bits: int,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Tensor:
    """Do the same with packed stacks. The outputs of a matrix are those of its parts, one stack each, after each other.

    Activations are quantized to 8 bits as by `packed_linear`; with `x_bits` 0 they stay float32.
    """
    x = x.float()
    if x_bits:
        x = quantize_rows(x.flatten(0, -2), x_bits).view(x.shape)
    stack = torch.cat([part.unpack().view(num_matrices, -1, part.width) for part in parts], dim=1)
    return multiply_groups(x, stack, ids, epilogue)
