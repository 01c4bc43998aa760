"""Compile every Triton kernel for a GPU that need not be there: `python -m tests.ops.compile_kernels 90` for compute
capability 9.0; with `once` behind it each kernel in one variant alone."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import penstock.ops.triton.bodies  # noqa: F401  registers the bodies
from penstock.ops import OPS, AdapterRows, LoraStacks
from penstock.ops.attention.attention import Shared, Work
from penstock.ops.attention.cache import FP8
from penstock.ops.matmul.epilogue import Epilogue
from penstock.ops.matmul.int_product import empty_ints
from penstock.ops.matmul.lora_stacks import LoraArea
from penstock.ops.matmul.product import is_skinny
from penstock.ops.sampling.extras import make_extras
from penstock.ops.sampling.row_params import make_row_params
from penstock.ops.triton import launch
from penstock.ops.triton.exact import product as exact_product
from penstock.ops.triton.exact.attention import count_splits
from penstock.ops.triton.tuning import INT_TILE_ROWS
from tests.ops.examples import examples_of
from tests.ops.examples.attention import paged
from tests.ops.examples.case import with_epilogue
from tests.ops.examples.latent import paged_latents
from tests.ops.examples.matmul import int_weight


class Elsewhere:
    """What Triton asks of a driver before it launches something."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def _calls(has_fp8: bool, has_extras: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """An example of each op with a body, and attention in all its ways, with a cache of 8-bit floats where the chip has
    them."""
    for name, op in OPS.items():
        if "cuda" in op.bodies and name != "attention" and (has_fp8 or "fp8" not in name):
            given = [example for example in examples_of(op) if _fits(name, example)][-1]
            yield name, given
            if "k_cache" in given and has_fp8 and name != "qkv_attention":  # which takes two other kernels then
                yield name, given | {cache: given[cache].to(FP8) for cache in ("k_cache", "v_cache")}
    sampled = {
        "logits": torch.zeros((2, 9000), dtype=torch.bfloat16),
        "temperature": torch.zeros(3),
        "keys": torch.zeros(3, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64),
        "rows": torch.zeros(2, dtype=torch.int32),
        "last": torch.zeros(3, dtype=torch.int64),
        "row_params": make_row_params(3, 9000),
    }
    yield "sample", sampled
    if has_extras:
        yield "sample", sampled | {"extras": make_extras(3, 9000, 512)}
    yield from (("int_product", with_epilogue(example)) for example in _int_products())
    yield from (("product", with_epilogue(example)) for example in _few_rows())
    if has_fp8:
        yield from (("fp8_group_product", with_epilogue(example)) for example in _fp8_groups())
    yield from _grouped_products(has_fp8)
    yield from _latents()
    yield from _loras()
    tiles = torch.tensor([[3, 0]], dtype=torch.int32)
    numbers = torch.zeros(4, dtype=torch.int32)
    shared = Shared(numbers, numbers, numbers.view(1, 4), 2)
    alibi = torch.linspace(0.1, 0.5, 8)
    ways: list[tuple[Work, dict[str, Any]]] = [
        (Work(3, tiles, 2, shared), {}),
        (Work(3, tiles, 1), {"window": 33}),
        (Work(3, tiles, 2), {"softcap": 20.0, "alibi": alibi}),
        (Work(3, tiles, 2, shared), {"sinks": alibi}),
    ]
    kinds = [*((torch.bfloat16, *way) for way in ways), *((FP8, *way) for way in ways[:1] if has_fp8)]
    for cache, work, extra in kinds:
        example = paged(1, [(1, 130), (1, 64), (1, 20), (9, 70)], 8, 2, 128, dtype=cache, **extra)
        yield "attention", example | {"q": example["q"].bfloat16(), "work": work}
    for dtype, heads, block_size in [(torch.bfloat16, 8, 16), (torch.float16, 2, 32), (torch.bfloat16, 16, 128)]:
        count = torch.ones(1, dtype=torch.int32) if heads == 8 else None
        example = paged(1, [(1, 130), (1, 64), (1, 20), (9, 70)], heads, 2, 128, block_size, dtype)
        yield (
            "attention",
            example | {"q": example["q"].to(dtype), "work": Work(3, tiles, num_tiles=count, longest=1000)},
        )
    q = torch.zeros((9, 4, 64), dtype=torch.bfloat16)
    yield "encoder_attention", {"q": q, "k": q, "v": q, "query_start": tiles.new_tensor([0, 9]), "scale": 0.125}


def _int_products() -> Iterator[dict[str, Any]]:
    """One row over several blocks, with all around it, and gated; each tile of rows, for few outputs and for many."""
    norm, bias = torch.ones(14336), torch.zeros(128)
    for bits in (8, 4):
        for width, extra in (
            (14336, {"norm": norm, "eps": 1e-5, "bias": bias}),
            (1024, {"gated": True, "activation": "silu", "eps": 1e-5}),
        ):
            words, scales = int_weight(1, bits, 128, width)
            yield {
                "x": torch.ones(1, width, dtype=torch.bfloat16),
                "words": words,
                "scales": scales,
                "num_out": 128,
                **extra,
            }
        for num_rows in INT_TILE_ROWS:
            words, scales = int_weight(1, bits, 128, 1024)
            yield {
                "x": torch.ones(num_rows, 1024, dtype=torch.bfloat16),
                "words": words,
                "scales": scales,
                "num_out": 128,
                "bias": bias,
                "gated": num_rows > 16,
                "activation": "silu",
            }
            words, scales = empty_ints(bits, 4096, 4096)
            yield {
                "x": torch.ones(num_rows, 4096, dtype=torch.float16 if num_rows == 32 else torch.bfloat16),
                "words": words,
                "scales": scales,
                "num_out": 4096,
            }
    for bits, num_rows in ((8, 1), (4, 1), (8, 16), (8, 128), (4, 64)):  # scales as files have them
        words, scales = empty_ints(bits, 4096, 4096, sets=4)
        x = torch.ones(num_rows, 4096, dtype=torch.bfloat16)
        yield {"x": x, "words": words, "scales": scales, "num_out": 4096}


def _fp8_groups() -> Iterator[dict[str, Any]]:
    """One row, tiles of each number of rows, and more rows than any has; blocks of 128 × 128 and narrower groups."""
    for num_rows in (1, *INT_TILE_ROWS, 600):
        for group in (128, 32):
            x = torch.zeros(num_rows, 1024, dtype=torch.bfloat16)
            yield {
                "x": x,
                "weight": torch.zeros(2048, 1024).to(torch.float8_e4m3fn),
                "scale": torch.ones(1024 // group, 2048),
                "group": group,
                "activation": "silu",
                "gated": group == 128,
            }


def _grouped_products(has_fp8: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """One program for each pair, and tiles of each number of rows."""
    for num_tokens, gated in ((1, True), (1, False), (40, True), (100, False), (260, True), (600, True)):
        x = torch.zeros(num_tokens, 512, dtype=torch.bfloat16)
        ids = torch.zeros(num_tokens, 2, dtype=torch.int32)
        epilogue = Epilogue(torch.zeros(8 * 256), "swiglu_oai" if gated else None, gated)
        weight = torch.zeros(8 * 256, 512, dtype=x.dtype)
        call = {"ids": ids, "num_matrices": 8, "epilogue": epilogue}
        yield "grouped_product", {"x": x, "weight": weight, **call}
        if has_fp8:
            scale = torch.zeros(8 * 256)
            codes, scales = weight.to(torch.float8_e4m3fn), torch.zeros(4, 8 * 256)
            yield "grouped_fp8_product", {"x": x, "codes": codes, "scale": scale, **call}
            yield "grouped_fp8_group_product", {"x": x, "codes": codes, "scale": scales, "group": 128, **call}
        for bits in (8, 4):
            words, scales = empty_ints(bits, 8 * 256, 512)
            yield "grouped_int_product", {"x": x, "words": words, "scales": scales, **call}


def _latents() -> Iterator[tuple[str, dict[str, Any]]]:
    """Single queries in KV splits and not, and tiles, as DeepSeek's models have them."""
    tiles = torch.tensor([[1, 0]], dtype=torch.int32)
    for num_heads, num_kv_splits in ((16, 2), (128, 1)):
        given = paged_latents(1, [(1, 40), (4, 20)], num_heads, (512, 64), dtype=torch.bfloat16)
        queries = {name: given[name].bfloat16() for name in ("q", "q_rope")}
        yield "latent_attention", given | queries | {"work": Work(1, tiles, num_kv_splits)}
    for num_tokens in (1, 100, 300):
        x = torch.zeros(num_tokens, 2, 192, dtype=torch.bfloat16)
        yield "head_product", {"x": x[:, :, :128], "weight": torch.zeros(2, 512, 128, dtype=x.dtype)}


def _loras() -> Iterator[tuple[str, dict[str, Any]]]:
    for num_rows in (1, 300):
        x = torch.zeros(num_rows, 2048, dtype=torch.bfloat16)
        weights = LoraStacks(16, (512, 2048), (256, 128, 128))
        LoraArea({"": weights}, 8, x.dtype, torch.device("cpu"))
        rows = AdapterRows(torch.zeros(num_rows, dtype=torch.int32))
        yield (
            "add_lora_stacks",
            {"x": x, "y": torch.zeros(num_rows, 512, dtype=x.dtype), "rows": rows, "weights": weights},
        )


def _few_rows() -> Iterator[dict[str, Any]]:
    for num_rows, width, eps in ((32, 1024, 1e-5), (9, 4096, 0.0)):
        x = torch.zeros(num_rows, width, dtype=torch.bfloat16)
        yield {
            "x": x,
            "weight": torch.zeros(4096, width, dtype=x.dtype),
            "eps": eps,
            "residual": None if eps else torch.zeros(num_rows, 4096, dtype=x.dtype),
        }


def _exact_calls(has_fp8: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Products of few rows and of many, KV splits side by side and one after the other."""
    yield from _grouped_products(has_fp8)
    yield from (("int_product", with_epilogue(example)) for example in _int_products())
    words, scales = empty_ints(4, 4096, 4096)
    x = torch.zeros(300, 4096, dtype=torch.bfloat16)
    yield "int_product", {"x": x, "words": words, "scales": scales, "num_out": 4096}
    if has_fp8:
        yield from (("fp8_group_product", with_epilogue(example)) for example in _fp8_groups())
    yield from _latents()
    yield from _loras()
    for num_rows, gated in ((1, False), (40, True), (70, False), (2000, True), (2000, False)):
        x, weight = torch.zeros(num_rows, 512, dtype=torch.bfloat16), torch.zeros(2048, 512, dtype=torch.bfloat16)
        after = {"activation": "silu", "gated": True} if gated else {"residual": torch.zeros_like(x).repeat(1, 4)}
        yield "product", with_epilogue({"x": x, "weight": weight, "eps": 1e-5, **after})
        if has_fp8:
            codes = weight.to(torch.float8_e4m3fn)
            yield "fp8_product", with_epilogue({"x": x, "weight": codes, "scale": torch.ones(2048), **after})
    yield "product", with_epilogue({"x": torch.zeros(3, 100), "weight": torch.zeros(64, 100), "bias": torch.zeros(64)})
    for length, size, extra in (
        (600, 128, {}),
        (600, 64, {"sinks": torch.zeros(8)}),
        (100, 256, {"window": 33}),
        (100, 64, {"softcap": 20.0, "alibi": torch.linspace(0.1, 0.5, 8)}),
    ):
        example = paged(1, [(1, length), (1, 64), (1, 20), (9, 70)], 8, 2, size, dtype=torch.bfloat16, **extra)
        for num_kv_splits in (1, count_splits(3, length, 2)):
            work = Work(3, torch.tensor([[3, 0]], dtype=torch.int32), num_kv_splits)
            yield "attention", example | {"q": example["q"].bfloat16(), "work": work}


def _fits(name: str, example: dict[str, Any]) -> bool:
    """Kernels only, not what a library or the reference does."""
    first = next(value for value in example.values() if isinstance(value, torch.Tensor))
    return (
        first.shape[0] > 0
        and "k_scale" not in example
        and example.get("tail") is None
        and (name != "product" or first.shape[0] == 1 or is_skinny(first, example["weight"], example.get("norm")))
    )


def main(capability: int, once: bool = False) -> None:
    triton.runtime.driver.set_active(Elsewhere(capability))
    launch.has_pdl = lambda device: capability >= 90  # type: ignore[assignment]
    launch.is_hopper = lambda device: capability == 90  # type: ignore[assignment]
    launch.count_sms = lambda device: 132  # type: ignore[assignment]
    compiled: Counter[str] = Counter()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled[self.fn.__name__] += 1
        if once and compiled[self.fn.__name__] > 1:
            return None
        return run(self, *args, grid=grid, warmup=True, **options)

    def unmultiplied(codes: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, **scales: Any) -> torch.Tensor:
        return torch.empty((codes.shape[0], weight.shape[1]), dtype=out_dtype)

    def multiply_elsewhere(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, adds: bool) -> bool:
        return True

    JITFunction.run = compile_only
    if capability == 90:  # cuBLAS multiplies, and a kernel applies the epilogue
        exact_product._can_use_cublas = lambda x, weight: x.shape[0] > 1000 and x.itemsize == 2
        exact_product.UNSPLIT.multiply = multiply_elsewhere  # type: ignore[method-assign]
    torch._scaled_mm = unmultiplied  # type: ignore[assignment]
    usual = [(OPS[name].bodies["cuda"], example) for name, example in _calls(capability >= 89, not once)]
    exact = [(OPS[name].exact_bodies["cuda"], example) for name, example in _exact_calls(capability >= 89)]
    for body, example in usual + exact:
        if "k_cache" in example:
            example["k_cache"] = example["k_cache"].transpose(2, 3).contiguous().transpose(2, 3)
        body.function(**example)
    print(" ".join(sorted(compiled)))


if __name__ == "__main__":
    main(int(sys.argv[1]), "once" in sys.argv[2:])
