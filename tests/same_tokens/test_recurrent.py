"""Bitwise equal answers where states are resumed from snapshots, alone and beside paged attention."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock import BeamSearchParams, SamplingParams
from penstock.models.config import Config
from penstock.models.families.parts import attention, gated_mlp
from penstock.models.layer import Rope
from penstock.models.spec import FAMILIES, Block, MixerBlock, ModelSpec, family
from tests.same_tokens.roads import alone, answer, chunked, displaced, shuffled, tiny_llm, tiny_model, together

MAMBA = FAMILIES["Mamba2ForCausalLM"]
HYBRID = "HybridForCausalLM"
LIKE = {**MAMBA.like[0], "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 96}


def read_hybrid(c: Config) -> ModelSpec:
    """Mamba-2 layers, each second one replaced by attention and an MLP; the last attention has a window."""
    c.ignore("num_attention_heads", "intermediate_size")
    spec = MAMBA.read(c)
    first = spec.layers[0]
    assert isinstance(first, MixerBlock)
    full = attention(c, rope=Rope(16, 1e4), size=16)
    feed, norm = gated_mlp(c, "silu"), first.mixer_norm
    blocks = [Block(mixer, feed, norm, norm) for mixer in (full, replace(full, window=24))]
    return replace(spec, layers=(first, blocks[0], first, blocks[1], first))


@pytest.fixture(params=["Mamba2ForCausalLM", HYBRID])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    family(HYBRID, like=LIKE)(read_hybrid)
    yield tiny_model(tmp_path, request.param)
    del FAMILIES[HYBRID]


def prompts() -> list[list[int]]:
    """Three that have 530 tokens in common, and short ones."""
    rng = random.Random(3)
    common = [rng.randrange(3, 200) for _ in range(530)]
    long = [common + [rng.randrange(3, 200) for _ in range(count)] for count in (3, 40, 17)]
    return long + [[rng.randrange(3, 200) for _ in range(count)] for count in (33, 33, 1, 20, 57)]


def params() -> list[SamplingParams]:
    common: dict[str, Any] = dict(max_tokens=12, ignore_eos=True, logprobs=2, detokenize=False)
    return [SamplingParams(temperature=0.9 * (i % 2), seed=i, **common) for i in range(len(prompts()))]


def test_every_road(model: str) -> None:
    with tiny_llm(model, enable_prefix_caching=False) as llm:
        expected = alone(llm, prompts(), params())
        assert len({tokens for tokens, _ in expected}) == len(expected)
        outputs = llm.generate(prompts()[3:], [one.clone(n=2) for one in params()[3:]], use_tqdm=False)
        assert [answer(output) for output in outputs] == expected[3:]
        greedy = [i for i, one in enumerate(params()[3:]) if not one.temperature]
        assert [answer(outputs[i], 1) for i in greedy] == [expected[3 + i] for i in greedy]
    with tiny_llm(model, max_num_batched_tokens=150, kv_cache_tokens=16384) as llm:
        cache = llm.service.engine.scheduler.cache
        assert cache.recurrent and cache.snapshot_stride == 512
        for road in (together, together, partial(shuffled, seed=1), partial(chunked, seed=2)):
            assert road(llm, prompts(), params()) == expected
        before = llm.stats()["num_cached_tokens"]
        assert together(llm, prompts()[1:2], params()[1:2]) == expected[1:2]
        assert llm.stats()["num_cached_tokens"] - before == 560  # at the prompt's last whole block
        other = [*prompts()[0][:520], 7, 8, 9]
        first = together(llm, [other], params()[:1])
        assert llm.stats()["num_cached_tokens"] - before - 560 == 512  # at the stride
        llm.reset_prefix_cache()
        assert together(llm, [other], params()[:1]) == first


def test_preempted(model: str) -> None:
    with tiny_llm(model, enable_prefix_caching=False) as llm:
        expected = alone(llm, prompts(), params())
    with tiny_llm(model, scheduling_policy="priority", max_num_seqs=2, kv_cache_tokens=16384) as llm:
        assert displaced(llm, prompts(), params()) == expected
        assert llm.stats()["num_preemptions"] > 2


def test_forked(model: str) -> None:
    """Beams copy their parent's state; its log probabilities are those of the beam read as a prompt."""
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=0.0, ignore_eos=True)
    with tiny_llm(model, enable_prefix_caching=False) as llm:
        found = llm.beam_search(prompts()[3:], params)
        assert llm.stats()["num_forks"] > 10
        for prompt, output in zip(prompts()[3:], found, strict=True):
            for beam in output.sequences:
                reading = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
                read = llm.generate([beam.tokens], reading, use_tqdm=False)[0].prompt_logprobs
                assert read is not None
                chosen = [at[token].logprob for at, token in zip(read, beam.tokens) if at is not None]
                assert sum(chosen[len(prompt) - 1 :]) == pytest.approx(beam.cum_logprob, abs=1e-4)
    with tiny_llm(model, block_size=8, max_num_seqs=4, max_num_batched_tokens=20) as llm:
        assert llm.beam_search(prompts()[3:], params) == found
