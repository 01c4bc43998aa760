from __future__ import annotations

from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.fp8_mlp import fp8_mlp
from penstock.ops.triton.matmul.fp8_product import apply_fp8_epilogue, fp8_gemm, quantize_gated, quantize_rows
from penstock.ops.triton.matmul.product import gemv


@fp8_mlp.impl("cuda", exact=False)
def _body(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    gate: Epilogue,
    epilogue: Epilogue = NO_EPILOGUE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    if x.shape[0] == 1 and x.is_contiguous():
        return gemv(gemv(x, gate_up, gate, norm, eps, gate_up_scale), down, epilogue, None, 0.0, down_scale)
    codes, scales = quantize_rows(x, norm, eps)
    codes, scales = quantize_gated(fp8_gemm(codes, gate_up, x.dtype), scales, gate_up_scale, gate)
    return apply_fp8_epilogue(fp8_gemm(codes, down, x.dtype), scales, down_scale, epilogue)
