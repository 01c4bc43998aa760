"""Drafts of n-grams on texts that repeat themselves: bit for bit the answers without if deterministic, else ties."""

from __future__ import annotations

from typing import Any

from penstock import LLM, SamplingParams
from tests.gpu.answers import ask, ids, require_same
from tests.gpu.check import Figures, check, require
from tests.gpu.exact import make_exact
from tests.gpu.models import engine, made
from tests.same_tokens.roads import alone, always, together

NGRAM = {"method": "ngram", "num_speculative_tokens": 6}
NUM_TOKENS = 48


def repetitive(count: int = 12) -> list[list[int]]:
    """Each has few tokens, in an order that comes again and again."""
    return [[3 + (5 * i + j) % 50 for j in range(4 + i % 5)] * (5 + i) for i in range(count)]


def params(given: list[list[int]], **more: Any) -> list[SamplingParams]:
    """Greedy and drawn in turn, from each prompt's own tokens: what comes repeats itself, too."""
    usual: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False, "logprobs": 1}
    return [
        SamplingParams(**(usual | more), temperature=i % 2, seed=i, logit_bias=dict.fromkeys(prompt[:4], 60.0))
        for i, prompt in enumerate(given)
    ]


def _require_drafts(llm: LLM, least: int) -> Figures:
    stats = llm.stats()
    drafted, accepted = stats["num_draft_tokens"], stats["num_accepted_tokens"]
    require(drafted > accepted > least, f"{accepted} of {drafted} draft tokens were accepted, over {least} were to be")
    return {"drafted": drafted, "accepted": accepted}


@check([("llama",), ("qwen3",), ("deepseek-v3",), ("smollm2",)])
def drafts_deterministic(name: str) -> Figures:
    """Every token and log probability is that without drafts: alone, together, beside rows that draft nothing."""
    given = repetitive()
    asked = params(given)
    mixed = [one.clone(presence_penalty=0.3) if i % 3 == 0 else one for i, one in enumerate(asked)]
    with make_exact(name, speculative_config=None) as llm:
        expected, with_penalties = alone(llm, given, asked), alone(llm, given, mixed)
        require(together(llm, given, asked) == expected, "without drafts answers depend on the company")
    with always(make_exact(name, speculative_config=NGRAM)) as llm:
        require(alone(llm, given, asked) == expected, "alone, answers differ from those without drafts")
        require(together(llm, given, asked) == expected, "together, answers differ from those without drafts")
        require(together(llm, given, asked) == expected, "from the prefix cache, answers differ")
        require(together(llm, given, mixed) == with_penalties, "beside rows with penalties, answers differ")
        return _require_drafts(llm, 100)


@check([("LlamaForCausalLM",), ("Gemma2ForCausalLM",), ("GptOssForCausalLM",), ("DeepseekV2ForCausalLM",)])
def drafts_fast(architecture: str) -> Figures:
    """The same tokens, or two that are as likely."""
    one, given = made(architecture), repetitive()
    usual: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
    asked = [SamplingParams(**usual) for _ in given]
    with engine(one.folder, speculative_config=None) as llm:
        expected = ids(ask(llm, given, asked))
    with always(engine(one.folder, speculative_config=NGRAM)) as llm:
        single = [ids(ask(llm, [prompt], asked[:1]))[0] for prompt in given[:4]]
        found = ids(ask(llm, given, asked))
        figures = _require_drafts(llm, 4)
    ties = require_same(one, given, found, expected) + require_same(one, given[:4], single, expected[:4])
    return {"ties": ties, **figures}
