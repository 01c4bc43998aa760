"""Where 8-bit floats are taken, where they are refused, and what they leave for the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.config import GIB, EngineConfig, Facts, GpuFacts, Resolved, resolve
from penstock.errors import InvalidConfig

GPU = GpuFacts(
    "H200",
    total_bytes=140 * GIB,
    free_bytes=139 * GIB,
    weight_bytes=16 * GIB,
    bytes_per_step_token=200_000,
    vocab_size=128_000,
    fp8_bytes=9 * GIB,
    layer_bytes=GIB // 2,
)
FP8 = [{"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}]


def resolved(options: dict[str, Any], **changed: Any) -> Resolved:
    return resolve(EngineConfig(**options), Facts(2048, 131_072, 16 * GIB, 2, gpu=replace(GPU, **changed)))


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("options", FP8)
def test_a_gpu_takes_them(options: dict[str, Any], device: str) -> None:
    settings = resolved(options | {"device": device})
    assert settings.device == "cuda" and settings.dtype == "bfloat16"
    assert (settings.kv_cache_dtype, settings.quantization) in (("fp8", None), ("bfloat16", "fp8"))


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("options", FP8)
def test_an_older_gpu_does_not(options: dict[str, Any], device: str) -> None:
    with pytest.raises(InvalidConfig, match="=fp8 needs a GPU of compute capability 8.9 or later; A100 is older"):
        resolved(options | {"device": device}, name="A100", has_fp8=False)


@pytest.mark.parametrize(
    ("more", "changed", "reason"),
    [
        ({"device": "cpu"}, {}, "set by the user"),
        ({}, {"checked": False}, "have not been checked on a GPU"),
        ({}, {"free_bytes": 10 * GIB}, "no room for the model"),
    ],
)
@pytest.mark.parametrize("options", FP8)
def test_a_cpu_does_not_and_the_refusal_says_why_it_is_one(
    options: dict[str, Any], more: dict[str, Any], changed: dict[str, Any], reason: str
) -> None:
    name = next(iter(options))
    with pytest.raises(InvalidConfig, match=f"{name}=fp8 is for GPUs, but device=cpu .*{reason}.*: set int8"):
        resolved(options | more, **changed)


def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="kv_cache_dtype=fp8 is for GPUs, but device=cpu .there is no GPU"):
        resolve(EngineConfig(kv_cache_dtype="fp8"), Facts(2048, 1024, 16 * GIB, 2))


def test_smaller_weights_leave_more_cache() -> None:
    plain, quantized = (resolved(options).kv_cache_tokens for options in ({}, {"quantization": "fp8"}))
    assert abs((quantized - plain) * 131_072 - 7 * GIB) < GIB


def test_a_layer_in_both_forms_must_fit_while_loading() -> None:
    """Weights of 9 GiB fit, with a layer of 118 GiB beside them they do not."""
    assert resolved({"quantization": "fp8"}, layer_bytes=116 * GIB).kv_cache_tokens > 0
    with pytest.raises(InvalidConfig, match="leaves no room for a cache beside 9.0 GiB of weights"):
        resolved({"quantization": "fp8", "device": "cuda"}, layer_bytes=118 * GIB)


def test_in_32_bits_what_is_not_quantized_is_counted_wide() -> None:
    narrow, wide = (
        resolved({"quantization": "fp8", "dtype": dtype}).kv_cache_tokens for dtype in ("bfloat16", "float32")
    )
    assert (narrow - wide) * 131_072 > 9 * GIB
