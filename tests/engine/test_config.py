"""Options, their limits, and the table that says each value and why."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from penstock.config import (
    GIB,
    GPU_RESERVE,
    INT_SCRATCH,
    MIN_CACHE_TOKENS,
    STEP_TOKENS,
    EngineConfig,
    Facts,
    GpuFacts,
    Resolved,
    resolve,
)
from penstock.config.resolve import DRAFT_LOGIT_ROWS
from penstock.config.speculation import SpeculativeConfig, parse_speculation
from penstock.errors import InvalidConfig, PenstockError
from penstock.ops.triton.tuning import DEQUANTIZE_SCRATCH_BYTES

FACTS = Facts(context=2048, bytes_per_token=1024, free_memory_bytes=16 * GIB, num_cores=2)


def resolved(facts: Facts = FACTS, **options: Any) -> Resolved:
    return resolve(EngineConfig(**options), facts)


def why(result: Resolved) -> dict[str, tuple[Any, str]]:
    return {setting.name: (setting.value, setting.why) for setting in result.settings}


def test_every_option_has_help_and_a_setting() -> None:
    assert all(option.metadata["help"] for option in fields(EngineConfig))
    assert [setting.name for setting in resolved().settings] == [option.name for option in fields(EngineConfig)]


def test_a_cpu_is_always_deterministic() -> None:
    assert resolved(deterministic=True).deterministic and not resolved().deterministic


def test_nothing_is_left_open() -> None:
    open_by_nature = {"tokenizer", "chat_template", "revision", "quantization", "override_generation_config"}
    open_by_nature |= {"kv_offloading_path", "max_cpu_loras", "kv_cache_dtype_skip_layers"}
    machines = {"distributed_secret_file", *(f"distributed_tls_{name}" for name in ("certfile", "keyfile", "ca"))}
    measured = {"ttft_slo_ms", "tpot_slo_ms"}
    assert {
        setting.name for setting in resolved().settings if setting.value is None
    } <= open_by_nature | machines | measured


def test_defaults_users_values_and_derived_ones_say_so() -> None:
    table = why(resolved(block_size=32, max_num_seqs=64, threads=1))
    assert table["block_size"] == (32, "set by the user")
    assert table["max_num_seqs"] == (64, "set by the user")
    assert table["threads"] == (1, "set by the user")
    assert table["max_model_len"] == (2048, "the model's context")
    assert table["kv_cache_tokens"] == (
        8192,
        "room for four requests of the longest length, and for 8192 tokens at least",
    )
    assert table["kv_cache_dtype"] == ("float16", "half the bytes to read of float32, next to no loss")
    assert table["dtype"] == ("auto", "default")
    assert table["max_num_batched_tokens"] == (STEP_TOKENS, "default")
    assert why(resolved())["threads"] == (2, "the cores this process may use")


def test_a_large_context_is_bounded_by_memory() -> None:
    table = why(resolved(Facts(1 << 20, 1024, 16 * GIB, 2)))
    assert table["kv_cache_tokens"] == (
        1 << 20,
        "what fits in 1 GiB (1 GiB, or a quarter of the free memory if that is less)",
    )
    assert table["max_model_len"] == (1 << 20, "the model's context")
    small = why(resolved(Facts(1 << 20, 1024, 2 * GIB, 2)))
    assert small["kv_cache_tokens"][0] == 1 << 19
    assert small["max_model_len"] == (1 << 19, f"the cache's size; the model's context is {1 << 20}")


def test_a_small_context_gets_the_least_cache() -> None:
    assert why(resolved(Facts(128, 1024, 16 * GIB, 2)))["kv_cache_tokens"][0] == MIN_CACHE_TOKENS


def test_an_embedding_model_computes_a_whole_prompt_in_one_step() -> None:
    facts = Facts(2048, 0, GIB, 2, whole_prompts=True)
    table = why(resolved(facts))
    assert table["max_num_batched_tokens"] == (2048, "an embedding model computes a prompt in one step")
    assert why(resolved(facts, max_num_batched_tokens=99))["max_num_batched_tokens"] == (99, "set by the user")


def test_the_cache_holds_at_least_one_request_of_the_length_asked_for() -> None:
    table = why(resolved(Facts(1 << 20, 1 << 20, GIB, 2), max_model_len=4096))
    assert table["kv_cache_tokens"] == (4096, "room for one request of max_model_len")


def test_a_small_cache_bounds_the_length() -> None:
    table = why(resolved(kv_cache_tokens=100))
    assert table["kv_cache_tokens"] == (100, "set by the user")
    assert table["max_model_len"] == (100, "the cache's size; the model's context is 2048")


def test_a_model_without_a_cache_gets_one_request() -> None:
    table = why(resolved(Facts(512, 0, GIB, 2)))
    assert table["kv_cache_tokens"] == (512, "the model keeps no cache; one longest request")


def test_resolve_is_pure_and_its_result_reads_like_the_config() -> None:
    config = EngineConfig(block_size=8)
    assert resolve(config, FACTS) == resolve(config, FACTS)
    assert config.max_model_len is None
    assert (resolve(config, FACTS).block_size, resolve(config, FACTS).max_model_len) == (8, 2048)
    with pytest.raises(AttributeError):
        resolve(config, FACTS).no_such_option  # type: ignore[attr-defined]  # noqa: B018


def test_a_length_over_the_context_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="max_model_len=4096 is over the model's context of 2048: set at most 2048"):
        resolved(max_model_len=4096)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0 is out of range: it must be 1 to 65535"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens=-1 is out of range: it must be 1 or more"),
        ({"max_num_batched_tokens": 2.5}, "max_num_batched_tokens=2.5 is not valid: it must be a whole number"),
        ({"max_num_seqs": True}, "max_num_seqs=True is not valid: it must be a whole number"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching=1 is not valid: it must be True or False"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens=0 is out of range: it must be 1 or more"),
        ({"max_model_len": 0}, "max_model_len=0 is out of range: it must be 1 or more"),
        ({"threads": 0}, "threads=0 is out of range: it must be 1 to 256"),
        ({"block_size": 0}, "block_size=0 is out of range: it must be 1 to 256"),
        ({"block_size": 257}, "block_size=257 is out of range: it must be 1 to 256"),
        ({"scheduling_policy": "fair"}, "scheduling_policy='fair' is unknown: choose one of fcfs, priority, lpm, sjf"),
        ({"capacity": "all"}, "capacity='all' is unknown: choose one of ondemand, reserve"),
        ({"dtype": "int3"}, "dtype='int3' is unknown: choose one of auto, float32, bfloat16, float16"),
        ({"load_format": "pickle"}, "load_format='pickle' is unknown: choose one of auto, dummy"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig) as refusal:
        EngineConfig(**options)
    assert str(refusal.value).startswith(message)
    assert isinstance(refusal.value, (PenstockError, ValueError))


def test_an_unknown_option_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(InvalidConfig, match="unknown option 'max_seqs': the options are tokenizer, .*max_num_seqs"):
        EngineConfig.from_options(max_seqs=3)
    assert EngineConfig.from_options(max_num_seqs=3).max_num_seqs == 3


def test_a_budget_below_the_number_of_rows_is_allowed() -> None:
    assert resolved(max_num_batched_tokens=1, max_num_seqs=64).max_num_batched_tokens == 1


GPU = GpuFacts(
    "H200",
    total_bytes=140 * GIB,
    free_bytes=139 * GIB,
    weight_bytes=16 * GIB,
    bytes_per_step_token=200_000,
    vocab_size=128_000,
)


def on_gpu(**changed: Any) -> Facts:
    return Facts(2048, 131_072, 16 * GIB, 2, gpu=replace(GPU, **changed))


def test_a_gpu_that_is_there_is_taken() -> None:
    table = why(resolved(on_gpu()))
    assert table["device"] == ("cuda", "H200")
    assert table["dtype"][0] == table["kv_cache_dtype"][0] == "bfloat16"
    assert table["max_num_seqs"] == (256, "default on a GPU") and table["max_num_batched_tokens"][0] == 8192
    left = 0.9 * 140 * GIB - 16 * GIB - GPU_RESERVE
    assert 0.9 * left < table["kv_cache_tokens"][0] * 131_072 < left
    assert table["kv_cache_tokens"][1] == "what is left of 0.9 of the GPU's memory"


def test_weights_in_host_memory_make_room_for_a_cache() -> None:
    """Breaks when what leaves the GPU is not given to the cache, or the buffers are not taken from it."""
    sizes = {"layer_bytes": GIB // 2, "layer_matrix_bytes": GIB // 4, "outer_bytes": 2 * GIB}
    none, some, all_of_it = (
        resolved(on_gpu(**sizes), cpu_offload_gb=size).kv_cache_tokens * 131_072 / GIB for size in (0, 4, 15.9)
    )
    assert 4 - 2 * (0.25 + 0.5) < some - none < 4
    assert 14 - 2 * 0.75 < all_of_it - none < 14  # embedding and head stay
    small = {"total_bytes": 26 * GIB, "free_bytes": 26 * GIB, **sizes}
    assert resolved(on_gpu(**small)).device == "cuda"
    tiny = on_gpu(**{**small, "total_bytes": 18 * GIB})
    assert resolved(tiny).device == "cpu"
    assert resolved(tiny, cpu_offload_gb=8).device == "cuda"
    with pytest.raises(
        InvalidConfig, match="no room for a cache .* more weights in the host's memory with cpu_offload"
    ):
        resolved(tiny, cpu_offload_gb=0.5)


@pytest.mark.parametrize(
    ("facts", "options", "error"),
    [
        (FACTS, {}, "cpu_offload_gb=4 keeps weights out of a GPU's memory, but device=cpu .*there is no GPU.*: leave"),
        (on_gpu(), {"device": "cpu"}, "device=cpu .set by the user.: leave it out"),
        (on_gpu(), {"cpu_offload_gb": 17}, "cpu_offload_gb=17 is over the 16.0 GiB of memory that are free: lower it"),
        (on_gpu(), {"kv_offloading_size": 13}, "cpu_offload_gb=4 beside kv_offloading_size=13 is over the 16.0 GiB"),
        (replace(on_gpu(), num_replicas=5), {}, "cpu_offload_gb=4 for each of 5 engines is over"),
        (on_gpu(), {"cpu_offload_gb": -1}, "cpu_offload_gb=-1 is out of range"),
    ],
)
def test_weights_that_cannot_be_offloaded(facts: Facts, options: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidConfig, match=error):
        resolved(facts, **({"cpu_offload_gb": 4} | options))


def test_steps_are_longer_where_nobody_waits_for_tokens() -> None:
    """Breaks when a small GPU's memory goes to longer steps, or the cache is sized without them."""
    offline, small = (
        why(resolved(replace(on_gpu(total_bytes=size * GIB, free_bytes=size * GIB), offline=True)))
        for size in (140, 48)
    )
    assert offline["max_num_batched_tokens"] == (16384, "default on a large GPU, offline")
    assert small["max_num_batched_tokens"] == (8192, "default on a GPU")
    served = why(resolved(on_gpu(free_bytes=140 * GIB)))["kv_cache_tokens"][0]
    assert (served - offline["kv_cache_tokens"][0]) * 131_072 == pytest.approx(8192 * 200_000, rel=1e-3)


def test_what_others_hold_of_a_gpu_is_not_counted_while_enough_is_free() -> None:
    """Breaks when their memory is taken from this engine's share."""
    alone, beside = (
        why(resolved(on_gpu(free_bytes=free * GIB), gpu_memory_utilization=0.4))["kv_cache_tokens"]
        for free in (139, 60)
    )
    assert alone == beside


def test_a_share_ends_where_free_memory_does() -> None:
    """Breaks when a cache is sized past what is free, which runs out after the engine is ready."""
    few, many = (why(resolved(on_gpu(free_bytes=free * GIB)))["kv_cache_tokens"] for free in (60, 100))
    assert few[1] == many[1] == "what is left of 0.95 of what is free of the GPU's memory"
    assert abs((many[0] - few[0]) * 131_072 - 0.95 * 40 * GIB) < GIB / 1000
    assert few[0] * 131_072 < 0.95 * 60 * GIB - 16 * GIB - GPU_RESERVE


@pytest.mark.parametrize(
    ("facts", "options", "reason"),
    [
        (FACTS, {}, "there is no GPU that torch can use"),
        (on_gpu(checked=False), {}, "models of this kind have not been checked on a GPU"),
        (
            on_gpu(lacks="Triton 3.6 or newer; this is 3.4.0: install a newer torch"),
            {},
            "a GPU needs Triton 3.6 or newer; this is 3.4.0: install a newer torch",
        ),
        (on_gpu(), {"kv_cache_dtype": "int8"}, "an int8 cache is for CPUs"),
        (on_gpu(free_bytes=20 * GIB), {}, "the GPU's memory has no room for the model"),
        (on_gpu(), {"device": "cpu"}, "set by the user"),
    ],
)
def test_else_the_cpu_is(facts: Facts, options: dict[str, Any], reason: str) -> None:
    table = why(resolved(facts, **options))
    assert table["device"] == ("cpu", reason)
    assert table["max_num_seqs"][0] == 64 and table["kv_cache_dtype"][0] == options.get("kv_cache_dtype", "float16")


def test_what_a_gpu_cannot_do_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="torch sees no GPU"):
        resolved(device="cuda")
    with pytest.raises(InvalidConfig, match="device=cuda needs Triton, which is not installed: .*, or set device=cpu"):
        resolved(on_gpu(lacks="Triton, which is not installed: install torch 2.10 or newer"), device="cuda")
    with pytest.raises(InvalidConfig, match="kv_cache_dtype=int8 is for CPUs"):
        resolved(on_gpu(), device="cuda", kv_cache_dtype="int8")
    with pytest.raises(
        InvalidConfig,
        match="leaves no room for a cache beside 16.0 GiB of weights, since 0.1 of the GPU's memory is 14.0 GiB",
    ):
        resolved(on_gpu(), device="cuda", gpu_memory_utilization=0.1)
    with pytest.raises(InvalidConfig, match="since 0.95 of what is free of the GPU's memory is 9.5 GiB: .* end what"):
        resolved(on_gpu(free_bytes=10 * GIB), device="cuda")


def test_an_embedding_model_on_a_gpu_computes_a_whole_prompt_in_one_step() -> None:
    facts = replace(on_gpu(), context=20_000, bytes_per_token=0, whole_prompts=True)
    table = why(resolved(facts))
    assert table["device"] == ("cuda", "H200") and table["kv_cache_tokens"][0] == 20_000
    assert table["max_num_batched_tokens"] == (20_000, "an embedding model computes a prompt in one step")


def test_wide_weights_leave_less_cache() -> None:
    narrow, wide = (resolved(on_gpu(), device="cuda", dtype=dtype).kv_cache_tokens for dtype in ("bfloat16", "float32"))
    assert (narrow - wide) * 131_072 > 16 * GIB


def test_integers_leave_more_cache() -> None:
    """Of 16 GiB 2 are embedding and head, which stay at 8 bits."""
    facts = on_gpu(outer_bytes=2 * GIB, largest_bytes=GIB)
    plain, *others = (resolved(facts, quantization=kind) for kind in (None, "int8", "int4"))
    for settings, weights in zip(others, (8.5, 14 / 3.2 + 17 / 16)):
        assert settings.device == "cuda" and settings.dtype == "bfloat16"
        gained = (settings.kv_cache_tokens - plain.kv_cache_tokens) * 131_072
        assert abs(gained - (16 - weights) * GIB + INT_SCRATCH) < GIB / 1000
    assert INT_SCRATCH == DEQUANTIZE_SCRATCH_BYTES


def test_a_matrix_must_fit_beside_the_integers() -> None:
    """On a GPU of 20 GiB, where the model would not fit in 16 bits."""
    facts = on_gpu(total_bytes=20 * GIB, free_bytes=20 * GIB, bytes_per_step_token=20_000, largest_bytes=GIB)
    assert why(resolved(facts))["device"][1] == "the GPU's memory has no room for the model"
    assert resolved(facts, quantization="int4").device == "cuda"
    large = replace(facts, gpu=replace(facts.gpu, largest_bytes=3 * GIB))  # type: ignore[type-var]
    with pytest.raises(InvalidConfig, match="leaves no room for a cache beside 5.1 GiB of weights"):
        resolved(large, quantization="int4", device="cuda")


def test_prompts_are_capped_on_a_gpu_that_serves_and_where_an_aim_is_given() -> None:
    assert not resolved().caps_prompts and why(resolved())["tpot_slo_ms"] == (None, "prompts are not capped on a CPU")
    served = resolved(replace(FACTS, gpu=GPU))
    assert served.caps_prompts and why(served)["tpot_slo_ms"] == (None, "5 decode steps, as measured")
    assert not resolved(replace(FACTS, gpu=GPU, offline=True)).caps_prompts
    assert not resolved(replace(FACTS, gpu=GPU, whole_prompts=True), tpot_slo_ms=9).caps_prompts
    for facts in (FACTS, replace(FACTS, gpu=GPU, offline=True)):
        given = resolved(facts, ttft_slo_ms=300)
        assert given.caps_prompts and why(given)["ttft_slo_ms"] == (300, "set by the user")
    for name, value in (("tpot_slo_ms", 0), ("ttft_slo_ms", -1), ("ttft_slo_ms", 1e12)):
        with pytest.raises(InvalidConfig, match=f"{name}=.* is out of range"):
            EngineConfig.from_options(**{name: value})


def test_trees_are_refused_on_a_gpu() -> None:
    """Deterministic or not: breaks when the option is taken and ignored."""
    for text in ('{"tree": true}', '{"method": "ngram", "tree": true}'):
        for deterministic in (False, True):
            with pytest.raises(InvalidConfig, match="tree=true cannot be used on a GPU.*leave tree out"):
                resolved(on_gpu(), speculative_config=text, deterministic=deterministic)
    assert resolved(on_gpu(), speculative_config='{"tree": false}').speculative_config == '{"tree": false}'


def test_a_drafting_model_takes_room_from_a_gpu_s_cache() -> None:
    """Its weights, the target's features of every token of a step, and its logits."""
    mtp = '{"method": "mtp"}'
    facts = on_gpu(draft_bytes=2 * GIB, draft_step_bytes=50_000)
    plain, other = (
        resolved(on_gpu(), speculative_config='{"method": "ngram"}'),
        resolved(facts, speculative_config=mtp),
    )
    assert other.device == "cuda" and other.speculative_config == mtp
    lost = 2 * GIB + 8192 * 50_000 + 2 * 128_000 * DRAFT_LOGIT_ROWS
    assert (plain.kv_cache_tokens - other.kv_cache_tokens) * 131_072 == pytest.approx(lost, rel=1e-3)
    with pytest.raises(InvalidConfig, match="beside 16.0 GiB of weights and 110.0 GiB of the drafting model's"):
        resolved(on_gpu(draft_bytes=110 * GIB), speculative_config=mtp, device="cuda")


def test_rejection_sampling_is_refused_on_a_gpu() -> None:
    text = '{"method": "draft_model", "model": "a", "verification": "rejection"}'
    with pytest.raises(InvalidConfig, match="verification=rejection draws on the host and cannot be used on a GPU"):
        resolved(on_gpu(), speculative_config=text)


def test_auto_said_aloud_drafts_on_a_gpu() -> None:
    """Breaks when `--speculative-config auto` silently means off there; left out, it does, with the reason."""
    asked = EngineConfig.from_options(speculative_config="auto")
    said = resolve(asked, on_gpu())
    assert parse_speculation(said.speculative_config) == SpeculativeConfig()
    left_out = resolved(on_gpu())
    assert left_out.speculative_config == "off"
    assert "drafts must be asked for" in why(left_out)["speculative_config"][1]
    cannot = resolve(asked, replace(FACTS, no_drafts="a state cannot go back"))
    assert why(cannot)["speculative_config"] == ("off", "a state cannot go back")
