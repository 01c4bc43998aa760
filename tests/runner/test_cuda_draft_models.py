"""Models that draft on the GPU's runner, without a GPU: answers as without drafts, and none of its own rejected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

from penstock import LLM, SamplingParams  # noqa: E402
from penstock.runner.cpu.drafting import NetDrafter  # noqa: E402
from penstock.runner.cuda.drafting.heads import CudaHeadsDrafter  # noqa: E402
from penstock.runner.cuda.drafting.net import CudaNetDrafter  # noqa: E402
from penstock.runner.cuda.runner import CudaRunner  # noqa: E402
from penstock.runner.memory import BlockMemory  # noqa: E402
from penstock.text.prompt_encoder import Encoded  # noqa: E402
from tests.draft import test_heads as heads  # noqa: E402
from tests.llm.tiny import dummy, runner, write_config  # noqa: E402
from tests.runner.test_cuda_runner import PROMPTS, SEQUENCES, answers, asking, no_gpu  # noqa: E402, F401  a fixture
from tests.same_tokens.test_draft_models import LENGTH, AlwaysAhead  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")
STEP = 48  # tokens
OPTIONS: dict[str, Any] = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": STEP, "kv_cache_dtype": "float32"}


def move_to_gpu(llm: LLM, deterministic: bool = False, speculation: Any = None) -> Any:
    """Give an engine the GPU's runner, with the drafting model that its CPU's has; returns the drafter."""
    theirs, engine = runner(llm.service), llm.service.engine
    memory = BlockMemory(len(theirs.memory.blocks) + 1, 16, theirs.memory.grouping, "float32")
    made: Any = CudaRunner(
        theirs.model,  # type: ignore[arg-type]
        memory,
        theirs.rows.grammars,
        SEQUENCES,
        STEP,
        eager=True,
        deterministic=deterministic,
        drafters=theirs.rows.drafters,
    )
    drafter: Any = theirs.drafter
    if isinstance(drafter, NetDrafter):
        made.install(CudaNetDrafter(made, drafter.net, LENGTH, STEP, torch.float32))
    elif drafter is not None:
        made.install(CudaHeadsDrafter(made, drafter.heads, LENGTH, STEP, torch.float32))
    made.warm()
    made.store = theirs.store
    engine.executor, engine.overlap = made, 1
    scheduler: Any = engine.scheduler
    scheduler._exact_starts = True
    if drafter is not None:
        scheduler._speculation = speculation or AlwaysAhead()
    return made.drafter


def require_drafts(llm: LLM, least: int) -> dict[str, Any]:
    executor: Any = llm.service.engine.executor
    assert not executor.drafter._has_failed
    stats = llm.stats()
    assert stats["num_draft_tokens"] > least and stats["num_failed_steps"] == 0
    return stats


def describe(method: str, folder: Path) -> dict[str, Any]:
    config: dict[str, dict[str, Any]] = {
        "same": {"method": "draft_model", "model": str(folder)},
        "another": {"method": "draft_model", "model": write_config(folder / "draft", "MistralForCausalLM")},
        "all layers": {"method": "self", "layers": [0, 1]},
        "self": {"method": "self", "layers": [0]},
    }
    return {**config[method], "num_speculative_tokens": LENGTH}


@contextmanager
def pair(folder: Path, method: str, architecture: str = "LlamaForCausalLM", **more: Any) -> Iterator[tuple[LLM, LLM]]:
    """Two engines with a GPU's runner, one without drafts."""
    model, config = write_config(folder, architecture), describe(method, folder)
    with dummy(model, **OPTIONS, **more) as plain, dummy(model, **OPTIONS, **more, speculative_config=config) as other:
        move_to_gpu(plain)
        move_to_gpu(other)
        yield plain, other


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "logprobs": 2},
    {"presence_penalty": 0.3},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 1.0, "n": 2},
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["same", "all layers"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_model_that_drafts_for_itself_is_always_right(
    tmp_path: Path, no_gpu: None, method: str, temperature: float, deterministic: bool
) -> None:
    """Breaks with a token drawn at another position, by another key, or after other keys and values."""
    model, config = write_config(tmp_path), describe(method, tmp_path)
    params = [asking(max_tokens=30, temperature=temperature, seed=i) for i in range(len(PROMPTS))]
    params[2] = params[2].clone(top_k=9, logit_bias={5: 2.0})
    params[3] = params[3].clone(n=2, logprobs=1)
    with dummy(model, **OPTIONS) as plain, dummy(model, **OPTIONS, speculative_config=config) as other:
        move_to_gpu(plain, deterministic)
        move_to_gpu(other, deterministic)
        expected = answers(plain, PROMPTS, params)
        for _ in range(2):  # the second time from the prefix cache
            assert answers(other, PROMPTS, params) == expected
        stats = require_drafts(other, 150)
    assert stats["num_accepted_tokens"] == stats["num_draft_tokens"]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("method", ["another", "self"])
def test_answers_are_those_without_drafts(tmp_path: Path, no_gpu: None, method: str, architecture: str) -> None:
    """Rows of all kinds, some of which the model does not draft for, prompts in chunks, again from the cache."""
    params = [asking(max_tokens=24 + i, seed=i, **kind) for i, kind in enumerate(KINDS)]
    with pair(tmp_path, method, architecture) as (plain, other):
        for _ in range(2):
            assert answers(other, PROMPTS, params) == answers(plain, PROMPTS, params)
        stats = require_drafts(other, 60)
    assert stats["num_draft_tokens"] > stats["num_accepted_tokens"] > 0


@pytest.mark.parametrize("method", ["another", "self", "same"])
def test_rows_that_give_way(tmp_path: Path, no_gpu: None, method: str) -> None:
    """A cache too small for all, and rows that are preempted every few steps, with drafts under way or not."""
    params = [asking(max_tokens=28, temperature=1.0, seed=i) for i in range(len(PROMPTS))]
    model, config = write_config(tmp_path), describe(method, tmp_path)
    with dummy(model, **OPTIONS) as plain:
        move_to_gpu(plain)
        expected = [list(output.outputs[0].token_ids) for output in plain.generate(PROMPTS, params, use_tqdm=False)]
    with dummy(model, **OPTIONS | {"kv_cache_tokens": 144}, speculative_config=config) as other:
        move_to_gpu(other)
        service = other.service
        collectors = [service.submit(Encoded(prompt), one) for prompt, one in zip(PROMPTS, params)]
        roster, step = service.engine.scheduler.roster, 0
        while service.engine.has_work:
            if roster.running and step % 4 == 3:
                roster.preempt(roster.running[step % len(roster.running)])
            service.step()
            step += 1
        assert [list(one.output().outputs[0].token_ids) for one in collectors] == expected
        stats = require_drafts(other, 20)
    assert step > 12 and stats["num_used_blocks"] == 0
    assert method != "same" or stats["num_accepted_tokens"] == stats["num_draft_tokens"]


class Resting(AlwaysAhead):
    count = 0

    def choose_ahead(self, num_rows: int) -> int:
        self.count += 1
        return 0 if self.count % 16 < 12 else LENGTH


def test_a_left_behind_model_catches_up(tmp_path: Path, no_gpu: None) -> None:
    """While it rests plans overlap; then it drafts as if it had never rested."""
    model, config = write_config(tmp_path), describe("same", tmp_path)
    params = [asking(max_tokens=60, temperature=1.0, seed=i) for i in range(len(PROMPTS))]
    with dummy(model, **OPTIONS) as plain, dummy(model, **OPTIONS, speculative_config=config) as other:
        move_to_gpu(plain)
        move_to_gpu(other, speculation=Resting())
        for _ in range(2):
            assert answers(other, PROMPTS, params) == answers(plain, PROMPTS, params)
        stats = require_drafts(other, 60)
    assert stats["num_accepted_tokens"] == stats["num_draft_tokens"]


def test_the_longest_answer_fits_with_its_drafts(tmp_path: Path, no_gpu: None) -> None:
    """Breaks where the places ahead of the last position are looked up in tables without room for them."""
    model = write_config(tmp_path)
    small = {**OPTIONS, "kv_cache_tokens": 96, "max_model_len": 96}
    for method in ("same", "self"):
        with dummy(model, **small, speculative_config=describe(method, tmp_path)) as other:
            move_to_gpu(other)
            params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
            (output,) = other.generate([list(range(10, 20))], params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 86
            require_drafts(other, 20)


@pytest.mark.parametrize("method", heads.METHODS)
def test_heads_draft_as_plain_pytorch(
    tmp_path: Path, no_gpu: None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is what plain PyTorch drafts after the whole text, and answers are those without drafts."""
    target, speculation = heads.save_target(tmp_path, method)
    weights, prompts = heads.make_weights(method), heads.make_prompts()
    seen: list[tuple[list[int], list[int]]] = []
    end = heads.LineMaker.end

    def note(self: Any, lines: list[heads.Line]) -> None:
        end(self, lines)
        seen.extend((list(line.device.state.tokens), [draft.token for draft in line.drafts]) for line in lines)

    monkeypatch.setattr(heads.LineMaker, "end", note)
    params = [asking(max_tokens=16, temperature=t, seed=i) for i, t in enumerate((0, 0, 0, 1.0))]
    with heads.open_llm(tmp_path, speculation, **OPTIONS) as other:
        move_to_gpu(other)
        found = [answers(other, prompts, params) for _ in range(2)]
        require_drafts(other, 60)
    with heads.open_llm(tmp_path, {"method": "ngram"}, **OPTIONS) as plain:
        move_to_gpu(plain)
        plain.service.engine.scheduler._speculation = None  # type: ignore[attr-defined]
        assert found == [answers(plain, prompts, params) for _ in range(2)]
    greedy = [(tokens, line) for tokens, line in seen if tokens[: len(prompts[3])] != prompts[3]]
    assert len(greedy) > 30
    for tokens, line in greedy[::2]:
        assert line == heads.draft(method, weights, target, tokens, len(line)) and line
