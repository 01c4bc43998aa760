"""The same requests along other roads: the same tokens, but for ties."""

from __future__ import annotations

from tests.gpu.answers import ask, ids, prompts, require_same
from tests.gpu.check import Figures, check, require
from tests.gpu.models import engine, made

KINDS = [  # one block table, several with windows, experts and sinks, latents
    ("LlamaForCausalLM",),
    ("Gemma2ForCausalLM",),
    ("GptOssForCausalLM",),
    ("DeepseekV2ForCausalLM",),
]


@check(KINDS)
def eager_and_recorded(architecture: str) -> Figures:
    one, given = made(architecture), prompts(4, 60, 11, 100, 33, 2)
    answers = []
    for eager in (True, False):
        with engine(one.folder, enforce_eager=eager) as llm:
            answers.append([*ids(ask(llm, given, max_tokens=60)), *ids(ask(llm, given[:1], max_tokens=60))])
    return {"ties": require_same(one, [*given, given[0]], *answers)}


@check([("LlamaForCausalLM",), ("BloomForCausalLM",), ("DeepseekV2ForCausalLM",)])
def a_shared_prefix(architecture: str) -> Figures:
    """40 sequences with 300 tokens in common, which are read once for all, and each alone."""
    one, common = made(architecture), prompts(300)[0]
    given = [common + prompt for prompt in prompts(*range(5, 45))]
    with engine(one.folder) as llm:
        ask(llm, given[:1])
        together = ids(ask(llm, given))
        cached = llm.stats()["num_cached_tokens"]
        llm.reset_prefix_cache()
        alone = [ids(ask(llm, [prompt]))[0] for prompt in given[:8]]
    require(cached >= 40 * 256, f"only {cached} tokens came from the cache")
    return {"ties": require_same(one, given[:8], together[:8], alone), "cached": cached}


@check(KINDS)
def long_prompts_in_chunks(architecture: str) -> Figures:
    one, given = made(architecture), prompts(400, 5, 333, 64)
    answers = []
    for most in (40, 4096):
        with engine(one.folder, max_num_batched_tokens=most) as llm:
            answers.append(ids(ask(llm, given)))
    return {"ties": require_same(one, given, *answers)}


@check(KINDS)
def from_the_prefix_cache(architecture: str) -> Figures:
    one, given = made(architecture), prompts(200, 31, 90)
    with engine(one.folder) as llm:
        cold = ids(ask(llm, given))
        warm = ids(ask(llm, given))
        cached = llm.stats()["num_cached_tokens"]
    require(cached > 200, f"only {cached} tokens came from the cache")
    return {"ties": require_same(one, given, warm, cold), "cached": cached}


@check(KINDS)
def preempted(architecture: str) -> Figures:
    """Twelve answers in a cache that holds five of them."""
    one, given = made(architecture), prompts(*(50 + i for i in range(12)))
    answers, lost = [], 0
    for size in (1024, 16384):
        with engine(one.folder, kv_cache_tokens=size, enable_prefix_caching=False) as llm:
            answers.append(ids(ask(llm, given, max_tokens=120)))
            lost = lost or llm.stats()["num_preemptions"]
    require(lost > 0, "nothing was preempted")
    return {"ties": require_same(one, given, *answers), "preemptions": lost}
