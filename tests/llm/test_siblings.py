"""Several answers to one prompt, seeds, and beams."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, BeamSearchParams, SamplingParams
from tests.llm import tiny
from tests.models import oracle

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def answers(llm: LLM, prompt: Any, **values: Any) -> list[list[int]]:
    params = SamplingParams(**{"max_tokens": 10, "seed": 11, **values})
    return [output.token_ids for output in llm.generate(prompt, params, use_tqdm=False)[0].outputs]


def test_siblings_differ_and_the_first_is_the_only_one(llm: LLM) -> None:
    alone = answers(llm, PROMPT)
    four = answers(llm, PROMPT, n=4)
    assert len(four) == 4 and four[0] == alone[0]
    assert len({tuple(ids) for ids in four}) == 4
    assert answers(llm, PROMPT, n=8)[:4] == four
    output = llm.generate(PROMPT, SamplingParams(n=3, seed=1), use_tqdm=False)[0]
    assert [one.index for one in output.outputs] == [0, 1, 2]


def test_siblings_share_the_prompt_and_copy_what_they_write(config_folder: str) -> None:
    with tiny.dummy(config_folder) as model:
        answers(model, list(range(60)), n=5)
        stats = model.stats()
        assert stats["num_forks"] == 4 and stats["num_copied_blocks"] >= 3
        assert stats["num_computed_tokens"] == 60 + 4 + 5 * 9


def test_greedy_siblings_are_equal(llm: LLM) -> None:
    three = answers(llm, PROMPT, n=3, temperature=0.0)
    assert three[0] == three[1] == three[2]


def test_best_of_keeps_the_likeliest(llm: LLM) -> None:
    every = llm.generate(PROMPT, SamplingParams(n=6, seed=4, max_tokens=7, logprobs=0), use_tqdm=False)[0].outputs
    best = sorted(every, key=lambda one: -(one.cumulative_logprob or 0.0))[:2]
    kept = llm.generate(PROMPT, SamplingParams(n=2, best_of=6, seed=4, max_tokens=7), use_tqdm=False)[0].outputs
    assert [one.token_ids for one in kept] == [one.token_ids for one in best]
    assert [one.index for one in kept] == [0, 1]
    assert kept[0].logprobs is None and kept[0].cumulative_logprob is None
    assert answers(llm, PROMPT, n=2, best_of=2, seed=4) == answers(llm, PROMPT, n=2, seed=4)


def test_seeds(llm: LLM) -> None:
    """A seeded answer is the same again, in any company and from a cold or a warm cache; others differ."""
    alone = answers(llm, PROMPT)
    assert answers(llm, PROMPT) == alone and answers(llm, PROMPT, seed=12) != alone
    assert answers(llm, PROMPT, seed=-1) == answers(llm, PROMPT, seed=2**64 - 1) != alone
    llm.reset_prefix_cache()
    others = [[token] * 5 for token in range(20)]
    params = (
        [SamplingParams(max_tokens=12)] * 10
        + [SamplingParams(max_tokens=10, seed=11)]
        + [SamplingParams(max_tokens=3)] * 10
    )
    company = llm.generate([*others[:10], PROMPT, *others[10:]], params, use_tqdm=False)
    assert company[10].outputs[0].token_ids == alone[0]


def test_without_a_seed_answers_differ_but_runs_repeat(config_folder: str) -> None:
    def run(seed: int) -> list[list[int]]:
        with tiny.dummy(config_folder) as model:
            model.service.intake.seed = seed
            return [answers(model, PROMPT, seed=None)[0] for _ in range(3)]

    first = run(0)
    assert len({tuple(ids) for ids in first}) == 3
    assert run(0) == first and run(1) != first


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Any]:
    """Eight ids: every continuation can be tried."""
    config = {**tiny.FAMILIES["LlamaForCausalLM"].like[0], "vocab_size": 8}
    theirs = oracle.make("LlamaForCausalLM", config, seed=2)
    folder: Path = oracle.save(theirs, tmp_path_factory.mktemp("models") / "eight")
    (folder / "generation_config.json").write_text('{"eos_token_id": 6}')
    return LLM(
        str(folder), skip_tokenizer_init=True, progress=False, threads=1, kv_cache_dtype="float32", kv_cache_tokens=2048
    ), theirs


def score(theirs: Any, prompt: list[int], answer: tuple[int, ...]) -> float:
    rows = oracle.logits(theirs, [*prompt, *answer]).log_softmax(-1)[len(prompt) - 1 : -1]
    return float(sum(row[token] for row, token in zip(rows, answer)))


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
def test_beams_wide_enough_find_the_best(small_vocabulary: tuple[LLM, Any], length_penalty: float) -> None:
    """Against every continuation of up to two tokens; 6 ends an answer."""
    model, theirs = small_vocabulary
    prompt = [1, 2, 3, 4, 5]
    every = [(first, second) for first, second in product(range(8), repeat=2) if first != 6] + [(6,)]
    ranked = sorted(((score(theirs, prompt, one) / len(one) ** length_penalty, one) for one in every), reverse=True)
    params = BeamSearchParams(beam_width=16, max_tokens=2, length_penalty=length_penalty)
    found = model.beam_search([prompt], params)[0].sequences
    assert len(found) == 16
    assert [tuple(one.tokens[5:]) for one in found] == [one for _, one in ranked[:16]]
    for one, (value, answer) in zip(found, ranked):
        assert one.tokens[:5] == prompt
        assert one.cum_logprob == pytest.approx(value * len(answer) ** length_penalty, abs=1e-3)
        assert one.finish_reason == ("stop" if answer[-1] == 6 else "length")


def test_beams_equal_transformers(real: LLM, theirs: Any) -> None:
    """Without an end token both keep the four best of every step."""
    prompts = [[5, 17, 200, 31], [7, 8], list(range(40, 70))]
    found = real.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True))
    assert real.stats()["num_used_blocks"] == 0
    assert real.tokenizer is not None
    for prompt, output in zip(prompts, found):
        with torch.no_grad():
            expected = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                num_beams=4,
                num_return_sequences=4,
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        assert [one.tokens for one in output.sequences] == expected.sequences.tolist()
        scores = [one.cum_logprob / 8 for one in output.sequences]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
        assert output.sequences[0].text == real.tokenizer.decode(output.sequences[0].tokens)


def test_one_beam_is_greedy(real: LLM) -> None:
    greedy = real.generate([[4, 5, 6]], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)[0].outputs[0]
    beam = real.beam_search([4, 5, 6], BeamSearchParams(beam_width=1, max_tokens=9))[0].sequences
    assert len(beam) == 1 and beam[0].tokens == [4, 5, 6, *greedy.token_ids]


@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_seqs=3),
        dict(kv_cache_tokens=64, block_size=4, max_model_len=32),
        dict(max_num_batched_tokens=1),
        dict(block_size=1),
        dict(enable_prefix_caching=False),
    ],
)
def test_beams_do_not_depend_on_room(config_folder: str, options: dict[str, Any]) -> None:
    prompts, params = [[1, 2, 3, 4, 5, 6, 7], [9, 8]], BeamSearchParams(beam_width=6, max_tokens=9)
    with tiny.dummy(config_folder) as model:
        expected = model.beam_search(prompts, params)
    with tiny.dummy(config_folder, **options) as model:
        assert model.beam_search(prompts, params) == expected
        model.service.engine.scheduler.check()
