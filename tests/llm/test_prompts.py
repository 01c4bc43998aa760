"""What may be a prompt, what comes back for it, and in which order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from tests.llm import tiny


def ids_of(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "prompt",
    [
        "the cat",
        {"prompt": "the cat"},
        tiny.tokenizer().encode("the cat").ids,
        tuple(tiny.tokenizer().encode("the cat").ids),
        {"prompt_token_ids": tiny.tokenizer().encode("the cat").ids},
        {"prompt": "the cat", "prompt_token_ids": tiny.tokenizer().encode("the cat").ids},
    ],
)
def test_one_prompt_in_any_form(text_llm: LLM, greedy: SamplingParams, prompt: Any) -> None:
    expected = text_llm.generate(["the cat"], greedy, use_tqdm=False)[0]
    outputs = text_llm.generate(prompt, greedy, use_tqdm=False)
    assert len(outputs) == 1 and outputs[0].finished
    assert outputs[0].prompt_token_ids == tiny.tokenizer().encode("the cat").ids
    assert outputs[0].outputs[0].token_ids == expected.outputs[0].token_ids
    assert (
        outputs[0].outputs[0].text == expected.outputs[0].text == tiny.tokenizer().decode(expected.outputs[0].token_ids)
    )
    has_text = isinstance(prompt, str) or isinstance(prompt, dict) and "prompt" in prompt
    assert outputs[0].prompt == ("the cat" if has_text else None)


def test_many_prompts_of_mixed_forms_keep_their_order(text_llm: LLM) -> None:
    prompts: list[Any] = ["one two", [5, 6, 7], {"prompt": "three"}, {"prompt_token_ids": [9]}, (8, 4), "one two"]
    params = [SamplingParams(temperature=0, max_tokens=9 - i, ignore_eos=True) for i in range(len(prompts))]
    alone = [text_llm.generate(prompt, one, use_tqdm=False)[0] for prompt, one in zip(prompts, params)]
    outputs = text_llm.generate(prompts, params, use_tqdm=False)
    assert ids_of(outputs) == ids_of(alone)
    assert [len(ids) for ids in ids_of(outputs)] == [9, 8, 7, 6, 5, 4]
    assert len({output.request_id for output in outputs}) == len(prompts)
    assert ids_of(text_llm.generate(iter(prompts), params, use_tqdm=False)) == ids_of(alone)  # type: ignore[arg-type]


def test_no_prompts_no_outputs(llm: LLM, greedy: SamplingParams) -> None:
    assert llm.generate([], greedy) == []


def test_one_params_for_all_or_one_for_each(llm: LLM) -> None:
    prompts = [[1, 2], [3, 4]]
    short, long = SamplingParams(temperature=0, max_tokens=3), SamplingParams(temperature=0, max_tokens=5)
    same = llm.generate(prompts, short, use_tqdm=False)
    each = llm.generate(prompts, [short, long], use_tqdm=False)
    assert ids_of(same) == [ids[:3] for ids in ids_of(each)]
    assert [len(ids) for ids in ids_of(each)] == [3, 5]


def test_progress_bar(llm: LLM, greedy: SamplingParams, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1], [2]], greedy, use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    llm.generate([[1], [2]], greedy)
    shown = capsys.readouterr()
    assert shown.out == "" and "Processed prompts: 100%" in shown.err and "2/2" in shown.err
    made: list[Any] = []

    class Bar:
        def __init__(self, total: int, **values: Any) -> None:
            self.total, self.counted, self.closed = total, 0, False
            made.append(self)

        def update(self, count: int) -> None:
            self.counted += count

        def close(self) -> None:
            self.closed = True

    llm.generate([[1], [2], [3]], greedy, use_tqdm=Bar)
    assert [(bar.total, bar.counted, bar.closed) for bar in made] == [(3, 3, True)]


def test_detokenize_false(text_llm: LLM) -> None:
    with_text = text_llm.generate("the", SamplingParams(temperature=0, max_tokens=6, logprobs=1), use_tqdm=False)[0]
    without = text_llm.generate(
        "the", SamplingParams(temperature=0, max_tokens=6, logprobs=1, detokenize=False), use_tqdm=False
    )[0]
    assert without.outputs[0].token_ids == with_text.outputs[0].token_ids
    assert without.outputs[0].text == "" != with_text.outputs[0].text
    assert with_text.outputs[0].logprobs and without.outputs[0].logprobs
    assert text_llm.tokenizer is not None
    for position, token in zip(with_text.outputs[0].logprobs, with_text.outputs[0].token_ids):
        assert position[token].decoded_token == text_llm.tokenizer.token_text(token)
    assert all(one.decoded_token is None for position in without.outputs[0].logprobs for one in position.values())


def test_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    folder = Path(tiny.write_config(tmp_path / "model"))
    settings: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "repetition_penalty": 1.25,
        "do_sample": True,
        "eos_token_id": [3, 4],
        "max_length": 99,
        "unknown": "value",
    }
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, dict(temperature=0.5, top_k=7, top_p=0.9, repetition_penalty=1.25, max_tokens=16)),
        ({"do_sample": False}, dict(temperature=0.0, top_k=0, max_tokens=16)),
        ({"max_new_tokens": 5}, dict(temperature=0.5, max_tokens=5)),
        ({"temperature": "hot", "top_k": None}, dict(temperature=1.0, top_k=0, top_p=0.9)),
        ({"top_p": 17}, dict(temperature=1.0, top_p=1.0)),
    ]
    for changes, expected in cases:
        (folder / "generation_config.json").write_text(json.dumps({**settings, **changes}))
        with tiny.dummy(str(folder)) as model:
            params = model.default_sampling_params()
            assert {name: getattr(params, name) for name in expected} == expected
            assert model.service.intake.eos_token_ids == (3, 4)
            output = model.generate([1, 2], use_tqdm=False)[0].outputs[0]
            assert len(output.token_ids) == expected.get("max_tokens", 16) or output.finish_reason == "stop"
    with tiny.dummy(tiny.write_config(tmp_path / "other")) as model:
        assert model.default_sampling_params() == SamplingParams()


def test_default_length_gives_way_to_a_long_prompt(tmp_path: Path) -> None:
    folder = Path(tiny.write_config(tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 100, "do_sample": False}))
    with tiny.dummy(str(folder)) as model:
        output = model.generate([[1] * 120, [1] * 8], use_tqdm=False)
        assert [len(ids) for ids in ids_of(output)] == [8, 100]


def test_chat(text_llm: LLM, greedy: SamplingParams) -> None:
    ask = [{"role": "user", "content": "the cat"}]
    again = [*ask, {"role": "assistant", "content": "sat"}]
    rendered = ["[user]the cat[assistant]", "[user]the cat[assistant]sat[assistant]"]
    expected = text_llm.generate(rendered, greedy, use_tqdm=False)
    outputs = text_llm.chat([ask, again], greedy, use_tqdm=False)
    assert ids_of(outputs) == ids_of(expected) and [output.prompt for output in outputs] == rendered
    assert ids_of(text_llm.chat(ask, greedy, use_tqdm=False)) == ids_of(expected)[:1]
    closed = text_llm.chat(ask, greedy, use_tqdm=False, add_generation_prompt=False)[0]
    assert closed.prompt == "[user]the cat"
    resumed = text_llm.chat(again, greedy, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)[0]
    assert resumed.prompt == "[user]the cat[assistant]sat"
    assert "".join(delta.text for delta in text_llm.stream(ask, greedy)) == outputs[0].outputs[0].text


def test_chat_template_values(tmp_path: Path, greedy: SamplingParams) -> None:
    folder = Path(tiny.write_config(tmp_path / "model", vocab_size=300))
    tiny.write_tokenizer(
        folder,
        "{{ messages[0].content }}{% if tools %}+{{ tools[0].name }}{% endif %}{{ mood }}"
        "{% if add_generation_prompt %}>{% endif %}",
    )
    ask = [{"role": "user", "content": "hi"}]
    with tiny.dummy(str(folder), skip_tokenizer_init=False) as model:

        def prompt(**values: Any) -> str | None:
            return model.chat(ask, greedy, use_tqdm=False, **values)[0].prompt

        assert prompt() == "hi>"
        assert prompt(tools=[{"name": "add"}]) == "hi+add>"
        assert prompt(chat_template_kwargs={"mood": "!"}, add_generation_prompt=False) == "hi!"
        assert prompt(chat_template_kwargs={"add_generation_prompt": False}) == "hi"


def test_salt_divides_the_cache(llm: LLM, greedy: SamplingParams) -> None:
    tokens = list(range(40))
    llm.reset_prefix_cache()
    cached = [
        llm.generate({"prompt_token_ids": tokens, "cache_salt": salt} if salt else tokens, greedy, use_tqdm=False)[
            0
        ].num_cached_tokens
        for salt in ("", "", "a", "a", "b")
    ]
    assert cached == [0, 32, 0, 32, 0]


def test_priority_decides_who_runs_first(config_folder: str) -> None:
    ends: list[str] = []
    with tiny.dummy(config_folder, max_num_seqs=1, scheduling_policy="priority") as model:
        step = model.service.step

        def noted() -> Any:
            done = step()
            ends.extend(collector.request.id for collector in done)
            return done

        model.service.step = noted  # type: ignore[method-assign]
        outputs = model.generate(
            [[1], [2], [3], [4]], SamplingParams(max_tokens=2), use_tqdm=False, priority=[3, 1, 2, 1]
        )
        assert ends == [outputs[i].request_id for i in (1, 3, 2, 0)]
