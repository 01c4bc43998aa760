"""What bad input gets: one line that names the value, the limit and the remedy, and an LLM that goes on working."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import LLM, AsyncLLM, BeamSearchParams, PenstockError, SamplingParams
from penstock.errors import InvalidConfig, InvalidModel, InvalidRequest
from tests.llm import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def refused(use: Callable[[], Any], kind: type[PenstockError], *parts: str) -> None:
    with pytest.raises(kind) as caught:
        use()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("", ["the prompt is empty", "at least one"]),
        ([""], ["the prompt is empty"]),
        ([[]], ["the prompt is empty", "at least one token"]),
        ({"prompt_token_ids": []}, ["the prompt is empty"]),
        ({"prompt": ""}, ["the prompt is empty"]),
        ([1, 300], ["token id 300", "0 to 299"]),
        ([1, -1], ["token id -1", "0 to 299"]),
        ([[1], [2, 2**70]], ["token id", "0 to 299"]),
        ([1, True], ["True is not a token id", "300"]),
        ([1, 2.0], ["2.0 is not a token id"]),
        ([1, None], ["None is not a token id"]),
        ([1, "a"], ["'a' is not a token id"]),
        ([1.5, 2.5], ["a prompt of type float", "give a string"]),
        ([[1, [2]]], ["[2] is not a token id"]),
        ([[1, np.zeros((50, 50))]], ["is not a token id"]),
        (None, ["type NoneType", "give a string"]),
        (7, ["type int", "give a string"]),
        (b"text", ["type bytes", "give a string"]),
        ([b"text"], ["type bytes"]),
        ([None], ["type NoneType"]),
        (["text", 5], ["type int"]),
        (object(), ["type object"]),
        (torch.tensor([[1, 2]]), ["type Tensor"]),
        ({"text": "x"}, ["keys ['text']", "'prompt' or 'prompt_token_ids'"]),
        ({}, ["keys []", "'prompt' or 'prompt_token_ids'"]),
        ({"prompt": "x", "multi_modal_data": {}}, ["'multi_modal_data'", "not supported"]),
        ({"prompt": [1, 2]}, ["must be strings", "'prompt_token_ids'"]),
        ({"prompt": "x", "cache_salt": 5}, ["'cache_salt' must be strings"]),
        ({"prompt_token_ids": "12"}, ["type str"]),
        ("x\ud800y", ["U+D800", "position 1"]),
        ([1] * 513, ["513 tokens", "512", "truncate_prompt_tokens", "max_model_len"]),
        ([1] * 512, ["512 tokens", "no room", "shorten"]),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value))[:40],
)
def test_prompts(text_llm: LLM, prompt: Any, parts: list[str]) -> None:
    refused(lambda: text_llm.generate(prompt, GREEDY, use_tqdm=False), InvalidRequest, *parts)
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        refused(lambda: text_llm.generate(["the cat", prompt], GREEDY, use_tqdm=False), InvalidRequest)
        refused(lambda: next(iter(text_llm.stream(prompt, GREEDY))), InvalidRequest)
    assert text_llm.stats()["num_waiting"] == 0
    assert len(text_llm.generate("the cat", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize("prompt", ["word " * 2_000_000, "a" * 10_000_000, [1] * 10_000_000, "\n \t" * 3_000_000])
def test_ten_megabytes_are_refused(text_llm: LLM, prompt: Any) -> None:
    refused(
        lambda: text_llm.generate(prompt, GREEDY, use_tqdm=False),
        InvalidRequest,
        "tokens",
        "512",
        "truncate_prompt_tokens",
    )
    message = [{"role": "user", "content": prompt}]
    if isinstance(prompt, str):
        refused(lambda: text_llm.chat(message, GREEDY, use_tqdm=False), InvalidRequest, "tokens", "512")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hello",
        {"role": "user"},
        [1],
        [[]],
        [{"content": "x"}],
        [{}],
        [{"role": "user", "content": 5}],
        [{"role": 5, "content": "x"}],
    ],
    ids=str,
)
def test_conversations(text_llm: LLM, messages: Any) -> None:
    refused(lambda: text_llm.chat(messages, GREEDY, use_tqdm=False), InvalidRequest)


@pytest.mark.parametrize("values", [5, [1], {5: 1}, {"messages": []}], ids=str)
def test_template_values(text_llm: LLM, values: Any) -> None:
    ask = [{"role": "user", "content": "x"}]
    refused(
        lambda: text_llm.chat(ask, GREEDY, use_tqdm=False, chat_template_kwargs=values),
        InvalidRequest,
        "chat_template_kwargs=",
    )


def test_lengths_that_do_not_match(llm: LLM) -> None:
    prompts = [[1], [2], [3]]
    refused(
        lambda: llm.generate(prompts, [GREEDY] * 2, use_tqdm=False),
        InvalidRequest,
        "3 prompts",
        "2 SamplingParams",
        "give one, or one for each",
    )
    refused(lambda: llm.generate(prompts, [], use_tqdm=False), InvalidRequest, "3 prompts", "0 SamplingParams")
    refused(
        lambda: llm.generate(prompts, GREEDY, priority=[1], use_tqdm=False),
        InvalidRequest,
        "3 prompts",
        "1 priorities",
        "one for each",
    )
    refused(
        lambda: llm.generate(prompts, GREEDY, priority=[1, 2, "x"], use_tqdm=False),  # type: ignore[list-item]
        InvalidRequest,
        "priority='x'",
    )


@pytest.mark.parametrize("params", [5, "greedy", {"temperature": 0}, [5], BeamSearchParams(beam_width=2, max_tokens=3)])
def test_params_of_another_type(llm: LLM, params: Any) -> None:
    refused(lambda: llm.generate([[1]], params, use_tqdm=False), InvalidRequest, "SamplingParams")
    refused(lambda: next(iter(llm.stream([1], params))), InvalidRequest)
    refused(lambda: llm.beam_search([1], SamplingParams()), InvalidRequest, "BeamSearchParams")  # type: ignore[arg-type]


NUMBERS: list[Any] = [float("nan"), float("inf"), "1", None, True, [1], 1 + 2j]
COUNTS: list[Any] = [1.5, "1", True, [1], -2]
OUT_OF_RANGE: dict[str, list[Any]] = {
    "n": [*COUNTS, 0, -1, 257, None],
    "best_of": [*COUNTS, 0, 257],
    "temperature": [*NUMBERS, -0.1],
    "top_k": [1.5, "1", True, -2, None],
    "top_p": [*NUMBERS, 0, -1, 1.01],
    "min_p": [*NUMBERS, -0.1, 1.1],
    "typical_p": [*NUMBERS, 0, 1.1],
    "repetition_penalty": [*NUMBERS, 0, -1],
    "presence_penalty": [*NUMBERS, -2.1, 2.1],
    "frequency_penalty": [*NUMBERS, -2.1, 2.1],
    "seed": [1.5, "1", True, 2**64, -(2**63) - 1],
    "max_tokens": [*COUNTS, 0, -1],
    "min_tokens": [*COUNTS, -1, None, 17],
    "logprobs": [*COUNTS, -1, 65],
    "prompt_logprobs": [*COUNTS, -1, 65],
    "truncate_prompt_tokens": [*COUNTS, 0, -1],
    "stop": [5, [5], [""], "", [None], {"a": 1}, b"x", ["x"] * 65],
    "bad_words": [5, [5], [""], [None], b"x"],
    "stop_token_ids": [5, "12", [-1], [1.5], [True], ["a"], [None]],
    "allowed_token_ids": [5, "12", [], [-1], [1.5], [True], ["a"]],
    "logit_bias": [5, [1], "x", {1: 101}, {1: -101}, {-1: 1}, {"1": 1}, {1: "x"}, {1: float("nan")}, {True: 1}],
    "ignore_eos": ["yes", 1, None],
    "include_stop_str_in_output": ["yes", 0],
    "detokenize": [None, 1],
    "skip_special_tokens": ["no", 2],
    "post_sampling_probs": ["no", 2],
    "structured_outputs": [5, "a*", {"regex": "a*"}],
    "guided_decoding": [5, {"regex": "a*"}],
    "output_kind": [0, "DELTA", None],
    "logits_processors": [print, "print", ["print"], {"a": print}],
    "thinking_token_budget": [*COUNTS],
    "repeat_last_n": COUNTS,
    "dry_penalty_last_n": [*COUNTS, None],
    "dry_allowed_length": [*COUNTS, -1, None],
    "dry_multiplier": [*NUMBERS, -1],
    "dry_base": [*NUMBERS, -1],
    "xtc_probability": [*NUMBERS, -0.1, 1.1],
    "xtc_threshold": [*NUMBERS, -0.1, 1.1],
    "dynatemp_range": [*NUMBERS, -1],
    "dynatemp_exponent": [*NUMBERS, -1],
    "top_n_sigma": NUMBERS,
    "mirostat": [*COUNTS, 3, None],
    "mirostat_tau": [*NUMBERS, -1],
    "mirostat_eta": [*NUMBERS, -1],
    "truncation_side": ["top", 1, None],
    "logprob_token_ids": ["x", [-1], [True]],
    "session": [5, "", "x" * 129],
    "session_ttl": [*NUMBERS, 0, 86401],
    "cache_priority": [*COUNTS, -1, 101],
    "dry_sequence_breakers": [5, [5], [""], b"x"],
    "speculation": [True, 5, "ngram", [1], {"method": "x"}, {"num_speculative_tokens": 0}],
}


def test_every_sampling_value_has_its_limits() -> None:
    from dataclasses import fields

    assert set(OUT_OF_RANGE) == {field.name for field in fields(SamplingParams)}
    for name, values in OUT_OF_RANGE.items():
        for value in values:
            refused(
                lambda name=name, value=value: SamplingParams(**{name: value}),  # type: ignore[misc]
                InvalidRequest,
                name,
                "it must be",
            )
    refused(lambda: SamplingParams(n=3, best_of=2), InvalidRequest, "best_of=2", "n=3")
    refused(lambda: SamplingParams(min_tokens=5, max_tokens=4), InvalidRequest, "min_tokens=5", "max_tokens=4")
    refused(lambda: SamplingParams(stop="x", detokenize=False), InvalidRequest, "detokenize=True", "stop_token_ids")


@pytest.mark.parametrize(
    "values",
    [
        dict(beam_width=0),
        dict(beam_width=33),
        dict(beam_width=1.5),
        dict(max_tokens=0),
        dict(max_tokens=None),
        dict(length_penalty=float("nan")),
        dict(temperature=1.0),
        dict(ignore_eos="x"),
        dict(beam_width=True),
    ],
    ids=str,
)
def test_beam_values(values: dict[str, Any]) -> None:
    refused(
        lambda: BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **values}),
        InvalidRequest,
        next(iter(values)),
        "it must be",
    )


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (dict(max_tokens=10_000, min_tokens=128), ["min_tokens=128", "127", "raise max_model_len"]),
        (dict(allowed_token_ids=[5, 256]), ["allowed_token_ids", "256", "0 to 255"]),
        (dict(logit_bias={999: 1.0}), ["logit_bias", "999", "0 to 255"]),
        (dict(stop="x"), ["stop strings need a tokenizer", "stop_token_ids"]),
        (dict(bad_words=["x"]), ["bad_words needs a tokenizer"]),
    ],
    ids=str,
)
def test_values_that_this_model_cannot_serve(llm: LLM, values: dict[str, Any], parts: list[str]) -> None:
    params = [GREEDY, SamplingParams(**values)]
    refused(lambda: llm.generate([[2], [1]], params, use_tqdm=False), InvalidRequest, *parts)
    assert llm.stats()["num_waiting"] == 0


def test_without_a_tokenizer(llm: LLM) -> None:
    for use in (
        lambda: llm.generate("text"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.beam_search("text", BeamSearchParams(beam_width=2, max_tokens=2)),
    ):
        refused(use, InvalidRequest, "needs a tokenizer", "token ids", "skip_tokenizer_init")


def test_a_request_larger_than_the_cache(config_folder: str) -> None:
    with tiny.dummy(config_folder, kv_cache_tokens=64, max_model_len=128) as model:
        refused(
            lambda: model.generate([[1] * 40, [1] * 20], SamplingParams(max_tokens=40), use_tqdm=False),
            InvalidRequest,
            "80 tokens",
            "5 cache blocks",
            "has 4",
            "raise kv_cache_tokens",
        )
        refused(lambda: model.generate([[1] * 70], GREEDY, use_tqdm=False), InvalidRequest, "70 tokens", "64")
        assert model.stats()["num_refused"] >= 1 and model.stats()["num_waiting"] == 0
        assert (
            len(
                model.generate([[1] * 40], SamplingParams(max_tokens=24, ignore_eos=True), use_tqdm=False)[0]
                .outputs[0]
                .token_ids
            )
            == 24
        )


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (dict(tensor_parallel=2), ["unknown option 'tensor_parallel'", "max_num_seqs"]),
        (dict(max_num_seqs=0), ["max_num_seqs=0", "1 to 65535"]),
        (dict(max_num_seqs=10**9), ["max_num_seqs=1000000000"]),
        (dict(max_num_seqs="8"), ["max_num_seqs='8'", "a whole number"]),
        (dict(max_num_seqs=2.0), ["max_num_seqs=2.0"]),
        (dict(max_num_seqs=True), ["max_num_seqs=True"]),
        (dict(block_size="16"), ["block_size='16'"]),
        (dict(max_num_batched_tokens=0), ["max_num_batched_tokens=0", "1 or more"]),
        (dict(block_size=0), ["block_size=0", "1 to 256"]),
        (dict(block_size=512), ["block_size=512", "1 to 256"]),
        (dict(kv_cache_tokens=0), ["kv_cache_tokens=0", "1 or more"]),
        (dict(kv_cache_tokens=10**14), ["cannot allocate a KV cache of", "lower kv_cache_tokens"]),
        (dict(max_model_len=0), ["max_model_len=0", "1 or more"]),
        (dict(max_model_len=129), ["max_model_len=129", "the model's context of 128", "128"]),
        (dict(dtype="float8"), ["dtype='float8'", "bfloat16"]),
        (dict(dtype=torch.float64), ["dtype='float64'"]),
        (dict(kv_cache_dtype="int3"), ["kv_cache_dtype='int3'"]),
        (dict(load_format="pickle"), ["load_format='pickle'"]),
        (dict(scheduling_policy="random"), ["scheduling_policy='random'", "fcfs"]),
        (dict(capacity="some"), ["capacity='some'", "ondemand"]),
        (dict(threads=0), ["threads=0", "1 to 256"]),
        (dict(threads=10**6), ["threads=1000000"]),
        (dict(seed="x"), ["seed='x'"]),
        (dict(enable_prefix_caching="no"), ["enable_prefix_caching='no'", "True or False"]),
        (dict(tokenizer=5), ["tokenizer=5", "a string"]),
        (dict(revision=["main"]), ["revision=['main']"]),
    ],
    ids=str,
)
def test_engine_options(config_folder: str, options: dict[str, Any], parts: list[str]) -> None:
    for kind in (LLM, AsyncLLM):
        given = {"load_format": "dummy", "skip_tokenizer_init": True, **options}
        refused(lambda kind=kind, given=given: kind(config_folder, **given), InvalidConfig, *parts)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (dict(architectures=["NobodyForCausalLM"]), ["unknown architecture NobodyForCausalLM", "LlamaForCausalLM"]),
        (dict(architectures=None), ["architectures", "must be a list"]),
        (dict(num_hidden_layers=0), ["num_hidden_layers=0", "from 1"]),
        (dict(num_hidden_layers="two"), ["num_hidden_layers='two'"]),
        (dict(hidden_size=None), ["hidden_size", "missing"]),
        (dict(some_new_attention_trick=3), ["some_new_attention_trick=3", "is unknown"]),
        (dict(rope_scaling={"rope_type": "spiral", "factor": 2.0}), ["spiral"]),
    ],
    ids=str,
)
def test_configs(tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    refused(lambda: tiny.dummy(tiny.write_config(tmp_path / "model", **changes)), InvalidModel, *parts)


def test_files_that_are_no_model(tmp_path: Path, config_folder: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(lambda: tiny.dummy(str(empty)), InvalidModel, str(empty), "config.json")
    refused(lambda: LLM(str(empty)), InvalidModel, str(empty), "config.json")
    refused(lambda: LLM(str(tmp_path / "nothing")), InvalidModel, "nothing")
    refused(lambda: LLM(str(tmp_path / "nothing.gguf")), InvalidModel, "nothing.gguf", "no such file")
    refused(lambda: LLM("no such model"), InvalidModel, "no model named 'no such model'", "smollm2")
    refused(lambda: LLM(""), InvalidModel, "''")
    refused(lambda: LLM(config_folder), InvalidModel, config_folder)
    (empty / "config.json").write_text("{ not json")
    refused(lambda: tiny.dummy(str(empty)), InvalidModel, "config.json")
    (empty / "config.json").write_text("[1]")
    refused(lambda: tiny.dummy(str(empty)), InvalidModel, "config.json")
    pickled = tmp_path / "weights.bin"
    pickled.write_bytes(b"\x80\x02}q\x00.")
    refused(lambda: LLM(str(pickled)), InvalidModel, "weights.bin", "safetensors")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    refused(lambda: LLM(str(tmp_path / "bad.gguf")), InvalidModel, "bad.gguf")


def test_a_tokenizer_that_is_missing_or_damaged(tmp_path: Path) -> None:
    folder = Path(tiny.write_config(tmp_path / "model"))
    refused(
        lambda: tiny.dummy(str(folder), skip_tokenizer_init=False),
        InvalidModel,
        str(folder),
        "tokenizer",
        "skip_tokenizer_init",
    )
    with tiny.dummy(str(folder)) as model:
        assert model.tokenizer is None and model.generate([1], GREEDY, use_tqdm=False)[0].outputs[0].text == ""
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE"}}))
    refused(lambda: tiny.dummy(str(folder), skip_tokenizer_init=False), InvalidModel, "tokenizer.json")


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    folder = Path(tiny.write_config(tmp_path / "model", vocab_size=300))
    tiny.write_tokenizer(folder, template=None)
    with tiny.dummy(str(folder), skip_tokenizer_init=False) as model:
        refused(lambda: model.chat([{"role": "user", "content": "x"}]), InvalidRequest, "no chat template", "generate")
        assert model.generate("the cat", GREEDY, use_tqdm=False)
