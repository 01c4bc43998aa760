from __future__ import annotations

from torch import Tensor

from penstock.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from penstock.ops.matmul.fp8_mlp import fp8_mlp
from penstock.ops.matmul.fp8_product import fp8_product
from penstock.ops.triton.exact.product import exact_gemm
from penstock.ops.triton.matmul.fp8_product import quantize_rows


@fp8_product.impl("cuda", exact=True)
def _body(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    epilogue: Epilogue = NO_EPILOGUE,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Quantize every row to FP8, a single one too, and multiply."""
    codes, scales = quantize_rows(x, norm, eps)
    return exact_gemm(codes, weight, epilogue, x.dtype, scales, scale)


@fp8_mlp.impl("cuda", exact=True)
def _mlp(
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
    hidden = _body(x, gate_up, gate_up_scale, gate, norm, eps)
    return _body(hidden, down, down_scale, epilogue)
