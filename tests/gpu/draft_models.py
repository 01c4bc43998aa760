"""Models that draft: `deterministic` answers are those without drafts, bit for bit, and a model that drafts for itself
has every token accepted."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

from penstock import LLM, SamplingParams
from penstock.runner.cpu.draft_lines import Line, LineMaker
from tests.gpu.answers import prompts
from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.exact import MODELS
from tests.gpu.models import DEVICE, engine
from tests.same_tokens.roads import Always

LENGTH = 4  # draft tokens
MIN_FAST = 0.9  # of a model's own draft tokens, accepted by kernels that depend on the company
MIN_GREEDY = 0.9  # of draft tokens that plain PyTorch drafts too, beside ties
GIVEN = prompts(4, 60, 11, 100, 33, 2, vocab=90)
_FOLDER = tempfile.TemporaryDirectory(prefix="penstock-drafts-")


class AlwaysAhead(Always):
    def choose_ahead(self, num_rows: int) -> int:
        return LENGTH


def draft_always(llm: LLM) -> None:
    scheduler: Any = llm.service.engine.scheduler
    scheduler._speculation = AlwaysAhead()


@contextmanager
def drafting(folder: Path, speculation: dict[str, Any] | None, **options: Any) -> Iterator[LLM]:
    """An engine whose model drafts in every step."""
    config = None if speculation is None else {**speculation, "num_speculative_tokens": LENGTH}
    with engine(folder, speculative_config=config, max_num_batched_tokens=256, **options) as llm:
        if config is not None:
            draft_always(llm)
        yield llm


@lru_cache
def small(name: str) -> Path:
    folder = Path(_FOLDER.name) / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[name][0]))
    return folder


def ask(llm: LLM, given: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Any]:
    """Tokens and log probabilities to the last bit, the second time from the prefix cache."""
    found = []
    for _ in range(2):
        for output in llm.generate(list(given), list(params), use_tqdm=False):
            require(output.error is None, f"a request failed: {output.error}")
            found.append([(list(one.token_ids), str(one.logprobs)) for one in output.outputs])
    return found


def kinds(temperature: float | None = None) -> list[SamplingParams]:
    each: list[dict[str, Any]] = [{}, {"logprobs": 2}, {"top_k": 7}, {"n": 2}, {"logit_bias": {5: 2.0}}, {"top_p": 0.8}]
    return [
        SamplingParams(
            **{"temperature": i % 2 if temperature is None else temperature, "seed": i, "max_tokens": 40}
            | {"ignore_eos": True, "detokenize": False}
            | kind
        )
        for i, kind in enumerate(each)
    ]


def describe(method: str, folder: Path, num_layers: int) -> dict[str, Any]:
    return {"method": "self", "layers": list(range(num_layers))} if method == "self" else {"model": str(folder)}


def acceptance(llm: LLM) -> Figures:
    """Requires that the drafter has not failed."""
    executor: Any = llm.service.engine.executor
    require(not executor.drafter._has_failed, "the drafter failed")
    stats = llm.stats()
    require(stats["num_draft_tokens"] > 50, f"only {stats['num_draft_tokens']} tokens were drafted")
    return {
        "drafted": stats["num_draft_tokens"],
        "accepted": stats["num_accepted_tokens"] / stats["num_draft_tokens"],
        "steps": stats["num_steps"],
    }


def prepare(llm: LLM) -> Figures:
    """Make all captures, those of the drafting model too."""
    begun, executor = time.perf_counter(), llm.service.engine.executor
    while llm.service.engine.prepare():
        pass
    found: Any = executor
    return {"captures": found.drafter._steps.pool.num_captures, "prepared_s": time.perf_counter() - begun}


@check([
    ("draft_model", "llama", 0.0), ("draft_model", "llama", 1.0), ("self", "llama", 1.0), ("draft_model", "qwen3", 1.0),
    ("self", "deepseek-v3", 0.0), ("draft_model", "gpt-oss", 1.0),
])  # fmt: skip
def draft_models_equal_to_the_target_are_always_right(method: str, name: str, temperature: float) -> Figures:
    """With deterministic kernels, launched one by one and captured. Answers are those without drafts."""
    folder, asked = small(name), kinds(temperature)
    common: dict[str, Any] = {"load_format": "dummy", **MODELS[name][1], "dtype": "bfloat16", "deterministic": True}
    speculation = describe(method, folder, MODELS[name][0]["num_hidden_layers"])
    with drafting(folder, None, **common) as llm:
        expected = ask(llm, GIVEN, asked)
    figures: Figures = {}
    for eager in (True, False):
        with drafting(folder, speculation, enforce_eager=eager, **common) as llm:
            if DEVICE != "cpu" and not eager:
                figures |= prepare(llm)
            found = ask(llm, GIVEN, asked)
            wrong = [i for i, (a, b) in enumerate(zip(found, expected)) if a != b]
            require(not wrong, f"other answers than without drafts: {wrong}")
            figures |= acceptance(llm)
            require(figures["accepted"] == 1.0, f"some of its own tokens were rejected: {figures}")
    return figures


@check([("draft_model",), ("self",)])
def draft_models_with_fast_kernels(method: str) -> Figures:
    """Nearly all of a model's own tokens are right, and all requests end."""
    folder = small("llama-float32")
    with drafting(folder, describe(method, folder, 2), load_format="dummy", dtype="float32") as llm:
        figures = prepare(llm) if DEVICE != "cpu" else {}
        ask(llm, GIVEN, kinds())
        figures |= acceptance(llm)
    require(figures["accepted"] > MIN_FAST, f"too many of its own tokens were rejected: {figures}")
    return figures


def save_heads(method: str, folder: Path) -> tuple[Path, dict[str, Any], Callable[[list[int], int], list[int]]]:
    """Save a model with random heads; returns its folder, the options, and what plain PyTorch drafts after a text."""
    try:
        from tests.draft import test_heads as heads
        from tests.draft import test_mtp as mtp
    except ImportError as error:
        raise Skip(str(error)) from None
    if method == "mtp":
        model, own = mtp.save_target(folder)
        return folder, {"method": method}, lambda tokens, count: mtp.draft(model, own, tokens, count)
    target, speculation = heads.save_target(folder, method)
    weights = heads.make_weights(method)
    return folder / "target", speculation, lambda tokens, count: heads.draft(method, weights, target, tokens, count)


@check([("medusa",), ("eagle",), ("eagle3",), ("mtp",)])
def draft_models_on_hidden_states(method: str) -> Figures:
    """Random heads in float32: deterministic answers are those without drafts, and greedy lines those of PyTorch."""
    folder, speculation, draft = save_heads(method, Path(_FOLDER.name) / method)
    given, asked = prompts(5, 70, 23, 1, vocab=320), kinds()[:4]
    seen: list[tuple[list[int], list[int]]] = []
    end = LineMaker.end

    def note(self: LineMaker, lines: Sequence[Line]) -> None:
        end(self, lines)
        seen.extend((list(line.device.state.tokens), [draft.token for draft in line.drafts]) for line in lines)

    common: dict[str, Any] = {"dtype": "float32", "deterministic": True, "max_model_len": 128}
    with drafting(folder, None, **common) as llm:
        expected = ask(llm, given, asked)
    with mock.patch.object(LineMaker, "end", note), drafting(folder, speculation, **common) as llm:
        require(ask(llm, given, asked) == expected, "other answers than without drafts")
        figures = acceptance(llm)
    greedy = [one for one in seen if one[0][: len(given[0])] == given[0]][::2]
    right = sum(line == draft(tokens, len(line)) for tokens, line in greedy)
    require(right >= MIN_GREEDY * len(greedy) > 5, f"{right} of {len(greedy)} lines are those of PyTorch")
    return figures | {"lines": f"{right}/{len(greedy)}"}


@check()
def draft_models_find_their_layers() -> Figures:
    """`self` without layers looks for them before the first request."""
    if DEVICE == "cpu":
        raise Skip("no GPU")
    folder = small("smollm2")
    with drafting(folder, {"method": "self"}, load_format="dummy", dtype="bfloat16") as llm:
        ask(llm, GIVEN[:2], kinds(0.0)[:2])
        executor: Any = llm.service.engine.executor
        return {"layers": len(executor.drafter.net.layers)} | acceptance(llm)
