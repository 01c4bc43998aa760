"""A request that the model fails on ends alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from penstock import LLM, BeamSearchParams, PenstockError, SamplingParams
from penstock.runner.step import Step
from tests.llm import tiny

POISON = 13
PROMPTS = [[1, 2, 3], [4, POISON, 5], [6] * 30, [7, 8]]
PARAMS = SamplingParams(max_tokens=12, seed=2, logprobs=2, ignore_eos=True)


def refuse(step: Step) -> None:
    if POISON in step.ids.tolist():
        raise ArithmeticError(f"token {POISON} is poison")


def contents(output: Any) -> Any:
    return output.prompt_token_ids, output.outputs, output.error


def test_a_step_that_raises(config_folder: str) -> None:
    """The step is done again, one request at a time, until the culprit is found."""
    harmless = PARAMS.clone(allowed_token_ids=[token for token in range(256) if token != POISON])
    with tiny.dummy(config_folder) as model:
        expected = [contents(output) for output in model.generate(PROMPTS, harmless, use_tqdm=False)]
        model.reset_prefix_cache()
        with tiny.before_forward(model.service, refuse):
            outputs = model.generate(PROMPTS, harmless, use_tqdm=False)
            assert [contents(outputs[i]) for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]
            failed = outputs[1]
            assert failed.finished and failed.outputs[0].finish_reason == "error" and not failed.outputs[0].token_ids
            assert failed.error == "ArithmeticError: token 13 is poison"
            assert model.stats()["num_failed"] == 1 and model.stats()["num_failed_steps"] >= 2
            with pytest.raises(PenstockError, match="the model failed on a request: ArithmeticError: token 13"):
                model.generate([PROMPTS[1]], harmless, use_tqdm=False)
            with pytest.raises(PenstockError, match="token 13 is poison"):
                list(model.stream(PROMPTS[1], harmless))
            with pytest.raises(PenstockError, match="token 13 is poison"):
                model.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=2))
        assert model.stats()["num_used_blocks"] == model.stats()["num_running"] == 0
        model.service.engine.scheduler.check()
        assert [contents(output) for output in model.generate(PROMPTS, harmless, use_tqdm=False)] == expected


def test_a_failure_in_the_middle_of_an_answer(config_folder: str) -> None:
    """What was generated until then is kept."""
    with tiny.dummy(config_folder) as model:
        expected = model.generate(PROMPTS, PARAMS, use_tqdm=False)
        victim = expected[0].outputs[0].token_ids
        poison = victim[6]
        others = [output.outputs[0].token_ids for output in expected[2:]]
        assert not any(poison in tokens[:-1] for tokens in others) and poison not in victim[:6], "choose another seed"

        def fail(step: Step) -> None:
            if poison in step.ids.tolist():
                raise MemoryError("no room")

        with tiny.before_forward(model.service, fail):
            outputs = model.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert outputs[0].outputs[0].token_ids == victim[:7] and outputs[0].outputs[0].finish_reason == "error"
        assert [contents(output) for output in outputs[2:]] == [contents(output) for output in expected[2:]]


@pytest.fixture(scope="module")
def damaged(checkpoint: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """One row of the embedding is NaN."""
    folder = tmp_path_factory.mktemp("models") / "damaged"
    shutil.copytree(checkpoint[0], folder)
    file: Path = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return str(folder)


def test_logits_that_are_no_numbers(damaged: str, real: LLM) -> None:
    params = PARAMS.clone(allowed_token_ids=[token for token in range(300) if token != POISON])
    with LLM(
        damaged,
        progress=False,
        threads=1,
        kv_cache_dtype="float32",
        kv_cache_tokens=128,
        max_model_len=64,
        block_size=8,
    ) as model:
        expected = [contents(output) for output in real.generate(PROMPTS, params, use_tqdm=False)]
        for _ in range(2):  # the second time, the blocks that held the damage are used again
            outputs = model.generate(PROMPTS, params, use_tqdm=False)
            assert [contents(outputs[i]) for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]
            assert outputs[1].outputs[0].finish_reason == "error" and "NaN" in (outputs[1].error or "")
            assert model.stats()["num_failed_steps"] == 0
        with pytest.raises(PenstockError, match="NaN: its weights or its arithmetic are damaged"):
            model.generate([PROMPTS[1]], params.clone(prompt_logprobs=0), use_tqdm=False)


def test_masks_that_leave_nothing(text_llm: LLM) -> None:
    end = tiny.tokenizer().token_to_id(tiny.EOS)
    assert end is not None
    params = SamplingParams(allowed_token_ids=[end], min_tokens=2, max_tokens=4)
    with pytest.raises(PenstockError, match="leave no token to sample: allow more tokens"):
        text_llm.generate("the cat", params, use_tqdm=False)


def test_some_siblings_fail(damaged: str) -> None:
    """The others are answers; and where the best are kept, a failed one is kept last."""
    with LLM(damaged, progress=False, threads=1, kv_cache_tokens=1024, max_model_len=64) as model:
        params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, seed=0, n=32)
        output = model.generate([PROMPTS[0]], params, use_tqdm=False)[0]
        reasons = {answer.finish_reason for answer in output.outputs}
        assert reasons == {"error", "length"}, "choose another seed"
        best = model.generate([PROMPTS[0]], params.clone(n=1, best_of=32), use_tqdm=False)[0]
        assert best.outputs[0].finish_reason == "length"
