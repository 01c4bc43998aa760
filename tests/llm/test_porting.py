"""What vLLM scripts pass and call: taken where it changes nothing, real where it does something, refused otherwise."""

from __future__ import annotations

import argparse
import asyncio
import copy
from typing import Any

import pytest
import torch

import penstock
from penstock import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    EngineArgs,
    GuidedDecodingParams,
    LLMEngine,
    PenstockError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from penstock.api.vllm.porting import HARMLESS, LIMITED, port_options
from penstock.errors import InvalidConfig, InvalidRequest
from tests.llm import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ASK = [{"role": "user", "content": "the cat"}]


# options


def test_harmless_options_change_nothing(config_folder: str, llm: LLM) -> None:
    options = dict(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        trust_remote_code=True,
        swap_space=4,
        seed=None,
        enable_chunked_prefill=True,
        task="generate",
        enable_lora=False,
        max_seq_len_to_capture=8192,
        disable_log_stats=True,
        distributed_executor_backend="mp",
        tokenizer_mode="auto",
        hf_overrides={},
        guided_decoding_backend="xgrammar",
        structured_outputs_config={"backend": "auto"},
        quantization=None,
        cpu_offload_gb=0,
        limit_mm_per_prompt={"image": 0},
        max_logprobs=20,
        dtype="float",
    )
    with tiny.dummy(config_folder, **options) as model:
        assert model.settings == tiny_settings(config_folder)
        assert (
            model.generate([1, 2], GREEDY, use_tqdm=False)[0].outputs
            == llm.generate([1, 2], GREEDY, use_tqdm=False)[0].outputs
        )


def tiny_settings(folder: str) -> Any:
    with tiny.dummy(folder, dtype="float32") as model:
        return model.settings


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (dict(dtype="half"), dict(dtype="float16")),
        (dict(dtype="float"), dict(dtype="float32")),
        (dict(dtype=torch.bfloat16), dict(dtype="bfloat16")),
        (dict(dtype="auto"), dict(dtype="auto")),
        (dict(kv_cache_dtype="fp8_e4m3"), dict(kv_cache_dtype="fp8")),
        (dict(load_format="safetensors"), dict(load_format="auto")),
        (dict(max_model_len=-1), dict(max_model_len=None)),
        (dict(max_model_len="auto"), dict(max_model_len=None)),
        (dict(seed=None, block_size=None), {}),
        (dict(max_model_len=None), dict(max_model_len=None)),
    ],
)
def test_other_spellings(given: dict[str, Any], made: dict[str, Any]) -> None:
    assert port_options(given) == made


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (dict(data_parallel_size=4), ["data_parallel_size=4", "one device", "set it to 1", "a server per device"]),
        (dict(enable_lora=True, max_loras=4, max_cpu_loras=2), ["max_cpu_loras=2", "max_loras=4"]),
        (dict(speculative_config={"method": "magic"}), ["speculative_config", "choose one of auto, ngram, suffix"]),
        (dict(hf_overrides={"max_position_embeddings": 9}), ["hf_overrides", "config.json"]),
        (dict(logits_processors=[print]), ["logits_processors", "SamplingParams(logits_processors"]),
        (dict(structured_outputs_config={"disable_any_whitespace": True}), ["StructuredOutputsParams"]),
        (dict(kv_cache_memory_bytes=1 << 30), ["kv_cache_tokens"]),
        (dict(cpu_offload_gb=4), ["cpu_offload_gb=4"]),
        (dict(task="classify"), ["task='classify'"]),
        (dict(task="embed"), ["task='embed'", "has no embeddings"]),
        (dict(runner="pooling"), ["runner='pooling'", "has no embeddings"]),
        (dict(max_logprobs=100), ["max_logprobs=100", "at most 64"]),
        (dict(enable_lora=1), ["enable_lora=1"]),
        (dict(tensor_parallel_size=True), ["tensor_parallel_size=True"]),
        (dict(tensor_paralel_size=1), ["unknown option 'tensor_paralel_size'"]),
    ],
)
def test_options_that_would_change_something(config_folder: str, options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        tiny.dummy(config_folder, **options)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_no_option_is_both() -> None:
    from dataclasses import fields

    from penstock.config import EngineConfig

    assert not set(HARMLESS) & set(LIMITED)
    assert not (set(HARMLESS) | set(LIMITED)) & {field.name for field in fields(EngineConfig)}


def test_engine_args_as_flags(config_folder: str) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.set_defaults(model=config_folder, load_format="dummy", skip_tokenizer_init=True)
    args = parser.parse_args(
        [
            "--threads",
            "1",
            "--tensor-parallel-size",
            "1",
            "--trust-remote-code",
            "--max-model-len",
            "64",
            "--no-enable-prefix-caching",
        ]
    )
    assert vars(EngineArgs.from_cli_args(args)) == vars(args)
    with LLM(**vars(args), progress=False) as model:
        settings = {setting.name: setting.value for setting in model.settings}
        assert settings["max_model_len"] == 64 and settings["enable_prefix_caching"] is False
    with pytest.raises(InvalidConfig, match="data_parallel_size=3"):
        EngineArgs(model=config_folder, data_parallel_size=3)


# sampling params


def test_params_may_be_changed(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert params is not llm.get_default_sampling_params()
    params.temperature, params.max_tokens, params.stop_token_ids = 0.0, 3, [7]
    assert params == SamplingParams(temperature=0, max_tokens=3, stop_token_ids=[7])
    with pytest.raises(InvalidRequest, match="temperature=-1 is out of range"):
        params.temperature = -1
    with pytest.raises(AttributeError, match="no 'temprature'"):
        params.temprature = 1
    assert params.temperature == 0
    params.min_tokens = 9
    with pytest.raises(InvalidRequest, match="min_tokens=9 is out of range: it must be at most max_tokens=3"):
        llm.generate([1], params, use_tqdm=False)
    params.max_tokens = 9
    assert len(llm.generate([1], params, use_tqdm=False)[0].outputs[0].token_ids) == 9


def test_a_request_keeps_what_it_was_given(llm: LLM) -> None:
    params = GREEDY.clone(logit_bias={3: 5.0})
    expected = llm.generate([1, 2], params, use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.stream([1, 2], params)
    tokens = list(next(stream).token_ids)
    params.max_tokens, params.logit_bias = 2, {7: 100.0}
    assert tokens + [id for delta in stream for id in delta.token_ids] == expected


def test_from_optional_and_copies() -> None:
    params = SamplingParams.from_optional(temperature=None, top_p=0.5, max_tokens=None, logit_bias={"5": 1.0}, n=None)
    assert params == SamplingParams(top_p=0.5, max_tokens=None, logit_bias={5: 1.0})
    other = copy.deepcopy(params)
    other.top_p = 0.7
    assert (params.top_p, other.top_p) == (0.5, 0.7)


def test_guided_decoding(text_llm: LLM) -> None:
    asked = GuidedDecodingParams(choice=["cat", "dog"], backend="outlines")
    assert asked == StructuredOutputsParams(choice=["cat", "dog"])
    params = SamplingParams(temperature=0, guided_decoding=asked)
    assert params == SamplingParams(temperature=0, structured_outputs=asked)
    assert text_llm.generate("the", params, use_tqdm=False)[0].outputs[0].text in ("cat", "dog")
    params.guided_decoding = GuidedDecodingParams(regex="[0-9]{3}")
    assert text_llm.generate("the", params, use_tqdm=False)[0].outputs[0].text.isdigit()
    with pytest.raises(InvalidRequest, match="its newer name"):
        SamplingParams(guided_decoding=asked, structured_outputs=asked)
    with pytest.raises(InvalidRequest, match="whitespace_pattern"):
        GuidedDecodingParams(json="{}", whitespace_pattern=" ")


# calls


def test_prompts_and_keywords(text_llm: LLM) -> None:
    expected = text_llm.generate("the cat", GREEDY, use_tqdm=False)[0].outputs
    ids = tiny.tokenizer().encode("the cat").ids
    for outputs in (
        text_llm.generate([TextPrompt(prompt="the cat")], GREEDY, use_tqdm=False, lora_request=None),
        text_llm.generate(TokensPrompt(prompt_token_ids=ids), GREEDY, use_tqdm=False),
        text_llm.generate(prompt_token_ids=[ids], sampling_params=GREEDY, use_tqdm=False),
        text_llm.generate({"prompt": "the cat", "multi_modal_data": None}, GREEDY, use_tqdm=False),
    ):
        assert outputs[0].outputs == expected
    with pytest.raises(InvalidRequest, match="give one LoRARequest"):
        text_llm.generate("the", GREEDY, lora_request=object())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="give one of them"):
        text_llm.generate("the", GREEDY, prompt_token_ids=ids)
    with pytest.raises(InvalidRequest, match="type NoneType"):
        text_llm.generate()


def test_chat_with_a_given_template(text_llm: LLM) -> None:
    output = text_llm.chat(
        ASK, GREEDY, use_tqdm=False, chat_template="<{{ messages[0].content }}>", chat_template_content_format="string"
    )[0]
    assert output.prompt == "<the cat>"
    assert text_llm.chat(ASK, GREEDY, use_tqdm=False)[0].prompt == "[user]the cat[assistant]"
    with pytest.raises(InvalidRequest, match="chat_template"):
        text_llm.chat(ASK, GREEDY, use_tqdm=False, chat_template="{% for %}")
    with pytest.raises(InvalidRequest, match="chat_template_content_format"):
        text_llm.chat(ASK, GREEDY, use_tqdm=False, chat_template_content_format="parts")


def test_absent_methods_say_why(llm: LLM) -> None:
    with pytest.raises(AttributeError, match="classifier"):
        llm.classify(["x"])  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="LLM has no 'generat'"):
        llm.generat  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(PenstockError, match="has no embeddings"):
        llm.score([1, 2], [[3], [4]])


def test_metrics(llm: LLM) -> None:
    outputs = llm.generate([[1, 2], [3]], [GREEDY, GREEDY.clone(max_tokens=12)], use_tqdm=False)
    for output in outputs:
        times = output.metrics
        assert times is not None and times.finished_time is not None and times.time_in_queue is not None
        order: list[Any] = [times.arrival_time, times.first_scheduled_time, times.first_token_time]
        assert order == sorted(order) and order[-1] < times.last_token_time == times.finished_time
        assert times.time_in_queue < times.first_token_latency  # type: ignore[operator]
        assert (output.encoder_prompt, output.lora_request, output.num_cached_tokens) == (None, None, 0)
    import time

    assert abs(outputs[0].metrics.arrival_time - time.time()) < 60  # type: ignore[union-attr]


def test_sleep_and_wake_up(config_folder: str) -> None:
    with tiny.dummy(config_folder) as model:
        before = model.generate([1, 2], GREEDY, use_tqdm=False)[0].outputs
        assert model.reset_prefix_cache() is True
        model.sleep(level=1)
        with pytest.raises(PenstockError, match="this LLM is asleep: call wake_up"):
            model.generate([1, 2], GREEDY, use_tqdm=False)
        model.wake_up()
        model.wake_up()
        assert model.generate([1, 2], GREEDY, use_tqdm=False)[0].outputs == before


# the tokenizer


def test_tokenizer(text_llm: LLM, text_folder: str) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(text_folder)
    ours = text_llm.get_tokenizer()
    assert ours is not None
    text = "the cat sat, 42"
    ids = theirs.encode(text)
    assert (
        ours.encode(text) == ids == ours(text).input_ids
        and ours([text, "a"])["input_ids"] == theirs([text, "a"])["input_ids"]
    )
    assert ours.decode(ids) == theirs.decode(ids) == text and ours.decode(torch.tensor(ids)) == text
    end = [*ids, ours.eos_token_id]
    assert ours.decode(end) == theirs.decode(end) == text + tiny.EOS
    assert ours.batch_decode([end], skip_special_tokens=True) == [text]
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    assert ours.vocab_size == theirs.vocab_size and ours.all_special_ids == theirs.all_special_ids
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids) == ours.tokenize(text)
    assert ours.convert_tokens_to_ids(ours.tokenize(text)) == ids
    assert (ours.eos_token, ours.eos_token_id) == (theirs.eos_token, theirs.eos_token_id) == (tiny.EOS, 0)
    assert (ours.bos_token_id, ours.pad_token) == (None, None)
    ours.pad_token = ours.eos_token
    assert ours.pad_token_id == 0
    for begins in (False, True):
        assert ours.apply_chat_template(
            ASK, tokenize=False, add_generation_prompt=begins
        ) == theirs.apply_chat_template(ASK, tokenize=False, add_generation_prompt=begins)
    assert (
        ours.apply_chat_template(ASK, add_generation_prompt=True)
        == text_llm.chat(ASK, GREEDY, use_tqdm=False)[0].prompt_token_ids
    )
    assert ours.chat_template == theirs.chat_template


# engines


def test_llm_engine(llm: LLM) -> None:
    engine = llm.llm_engine
    assert isinstance(engine, LLMEngine) and engine is llm.llm_engine
    assert engine.model_config.max_model_len == 128 and engine.model_config.get_vocab_size() == 256
    whole = {
        str(i): llm.generate([i, 5], GREEDY.clone(n=1 + i, seed=i, temperature=i), use_tqdm=False)[0] for i in range(2)
    }
    for kind in RequestOutputKind:
        for i in range(2):
            engine.add_request(str(i), [i, 5], GREEDY.clone(n=1 + i, seed=i, temperature=i, output_kind=kind))
        engine.add_request("gone", [9], GREEDY)
        with pytest.raises(InvalidRequest, match="request_id='0' is in use"):
            engine.add_request("0", [1], GREEDY)
        assert engine.get_num_unfinished_requests() == 3
        engine.abort_request("gone")
        seen: dict[str, list[Any]] = {"0": [], "1": []}
        while engine.has_unfinished_requests():
            for output in engine.step():
                seen[output.request_id].append(output)
        for id, outputs in seen.items():
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert len(outputs) in ((1,) if kind is RequestOutputKind.FINAL_ONLY else (6, 7))
            if kind is RequestOutputKind.DELTA:
                joined = [
                    [
                        token
                        for output in outputs
                        for answer in output.outputs
                        if answer.index == k
                        for token in answer.token_ids
                    ]
                    for k in range(len(whole[id].outputs))
                ]
                assert joined == [answer.token_ids for answer in whole[id].outputs]
            else:
                assert outputs[-1].outputs == whole[id].outputs
                assert outputs[-1].prompt_token_ids == whole[id].prompt_token_ids


def test_llm_engine_keeps_the_best(llm: LLM) -> None:
    params = SamplingParams(n=1, best_of=3, seed=4, max_tokens=5, logprobs=0, ignore_eos=True)
    llm.llm_engine.add_request("a", [1, 2], params)
    found = []
    while llm.llm_engine.has_unfinished_requests():
        found += llm.llm_engine.step()
    assert [one.outputs for one in found] == [llm.generate([1, 2], params, use_tqdm=False)[0].outputs]


def test_async_engine(text_folder: str, text_llm: LLM) -> None:
    args = AsyncEngineArgs(
        model=text_folder,
        load_format="dummy",
        threads=1,
        kv_cache_tokens=2048,
        enforce_eager=False,
        disable_log_requests=True,
    )
    prompt, params = "the cat", GREEDY.clone(n=2, temperature=1.0, seed=3, logprobs=1)
    whole = text_llm.generate(prompt, params, use_tqdm=False)[0]

    async def main() -> None:
        engine = AsyncLLMEngine.from_engine_args(args)
        try:
            *early, last = [output async for output in engine.generate(prompt, params, request_id="a")]
            counts = [len(output.outputs[0].logprobs or ()) for output in early]
            assert counts == [len(output.outputs[0].token_ids) for output in early] == sorted(counts) and counts[0] == 1
            assert last.finished and last.request_id == "a" and last.prompt == prompt
            assert last.outputs == whole.outputs and last.metrics is not None
            assert last.prompt_token_ids == whole.prompt_token_ids
            texts = ["", ""]
            delta = params.clone(output_kind=RequestOutputKind.DELTA)
            async for output in engine.generate(prompt, delta, "b"):
                for answer in output.outputs:
                    texts[answer.index] += answer.text
            assert texts == [answer.text for answer in whole.outputs]
            tokenizer = await engine.get_tokenizer()
            assert tokenizer is not None and tokenizer.eos_token == tiny.EOS
            reasons: list[Any] = []
            async for output in engine.generate(prompt, GREEDY.clone(max_tokens=400), "c"):
                reasons.append(output.outputs[0].finish_reason)
                await engine.abort("c")
            assert reasons[-1] == "abort" and len(reasons) < 300 and output.finished
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_modules_of_vllm() -> None:
    from penstock import inputs, outputs, sampling_params

    for module in (inputs, outputs, sampling_params):
        for name in module.__all__:
            assert getattr(penstock, name, getattr(module, name)) is getattr(module, name)


def test_score_and_encode(encoder: str) -> None:
    with LLM(encoder, progress=False, threads=1, runner="pooling", trust_remote_code=True) as model:
        query, texts = "the cat", ["the dog", "one two three"]
        vectors = torch.tensor([one.outputs.embedding for one in model.embed([query, *texts], use_tqdm=False)])
        expected = torch.nn.functional.cosine_similarity(vectors[:1], vectors[1:])
        found = model.score(query, texts, use_tqdm=False)
        assert torch.allclose(torch.tensor([one.outputs.score for one in found]), expected, atol=1e-6)
        pairs = model.score([query, query], texts, use_tqdm=False)
        assert [one.outputs for one in pairs] == [one.outputs for one in found]
        assert found[0].prompt_token_ids == [
            *model.embed(query, use_tqdm=False)[0].prompt_token_ids,
            *model.embed(texts[0], use_tqdm=False)[0].prompt_token_ids,
        ]
        assert torch.equal(model.encode(query, use_tqdm=False)[0].outputs.data, vectors[0])
        assert model.embed(query, use_tqdm=False)[0].outputs.hidden_size == vectors.shape[1]
        with pytest.raises(InvalidRequest, match="2 texts came with 3"):
            model.score([query] * 2, [query] * 3)
        with pytest.raises(InvalidRequest, match="pooling_task='classify'"):
            model.encode(query, pooling_task="classify")
    with pytest.raises(InvalidConfig, match="embeds texts and generates none"):
        LLM(encoder, progress=False, threads=1, task="generate")
