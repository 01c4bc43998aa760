"""Steps that are captured while the engine is idle: the answers of an engine that launches every kernel, and no step
that is new when a request needs it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock import LLM
from tests.gpu import exact
from tests.gpu.answers import ask, ids, prompts, require_same
from tests.gpu.check import Figures, Skip, check, require
from tests.gpu.models import DEVICE, engine, made
from tests.same_tokens.roads import together

LENGTHS = (4, 60, 11, 100, 33, 2, 380, 17, 9, 250, 1, 48)


def prepare(llm: LLM) -> Figures:
    """Make all captures; returns how many, and what they took."""
    if DEVICE == "cpu":
        raise Skip("captures need a GPU")
    torch.cuda.synchronize()
    free, begun = torch.cuda.mem_get_info()[0], time.perf_counter()
    while llm.service.engine.prepare():
        pass
    torch.cuda.synchronize()
    executor: Any = llm.service.engine.executor
    return {
        "captures": executor._graphs.pool.num_captures,
        "seconds": time.perf_counter() - begun,
        "mib": (free - torch.cuda.mem_get_info()[0]) / 2**20,
    }


@contextmanager
def nothing_new(llm: LLM) -> Iterator[None]:
    """Require that nothing is compiled, captured or launched kernel by kernel meanwhile."""
    from triton import knobs

    executor: Any = llm.service.engine.executor
    graphs, mixed, missed = executor._graphs, executor._mixed, list[str]()
    before, num_captures = knobs.compilation.listener, graphs.pool.num_captures

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        missed.append(src.name)

    knobs.compilation.listener = listen
    try:
        yield
    finally:
        knobs.compilation.listener = before
    require(not missed, f"compiled or loaded inside a request: {' '.join(missed)}")
    require(graphs.pool.num_captures == num_captures, "a step was captured inside a request")
    wanted = [*graphs.num_wanted, *mixed.num_wanted]
    require(not wanted, f"steps were not captured: {wanted[:5]}")


@check([("LlamaForCausalLM",), ("Gemma2ForCausalLM",), ("Qwen3ForCausalLM",)])
def no_step_of_a_request_is_new(architecture: str) -> Figures:
    one, given = made(architecture), prompts(*LENGTHS)
    answers = []
    figures: Figures = {}
    for is_prepared in (False, True):
        with engine(one.folder, enforce_eager=not is_prepared, max_num_batched_tokens=1024) as llm:
            if is_prepared:
                figures = prepare(llm)
                with nothing_new(llm):
                    found = [ids(ask(llm, given, max_tokens=60)), ids(ask(llm, given[:5], max_tokens=60))]
            else:
                found = [ids(ask(llm, given, max_tokens=60)), ids(ask(llm, given[:5], max_tokens=60))]
            answers.append(found[0] + found[1])
    return figures | {"ties": require_same(one, [*given, *given[:5]], *answers)}


@check()
def sampling_of_captured_steps() -> Figures:
    """Filters, penalties and log probabilities of prompts and decode rows."""
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"top_k": 1, "temperature": 0.8},
        {"logprobs": 3},
        {"min_p": 0.99, "temperature": 1.2},
    ]
    one, given, answers = made("LlamaForCausalLM"), prompts(*LENGTHS), []
    for is_prepared in (False, True):
        with engine(one.folder, enforce_eager=not is_prepared) as llm:
            if is_prepared:
                prepare(llm)
            answers.append([tokens for kind in kinds for tokens in ids(ask(llm, given, **kind))])
    differ = sum(a != b for a, b in zip(*answers))
    require(differ <= 2, f"{differ} of {len(answers[0])} answers differ")
    return {"different": differ}


@check([("llama",), ("smollm2-fp8",)])
def deterministic_and_captured(name: str) -> Figures:
    """The same bits as alone, in an engine that captured nothing before."""
    if DEVICE == "cpu":
        raise Skip("captures need a GPU")
    known = exact.known(name)
    with known.make() as llm:
        figures = prepare(llm)
        require(together(llm, exact.prompts(), exact.params()) == known.answers, "some answers differ")
        require(exact.tokens(llm) == known.tokens, "some tokens differ")
    return figures
