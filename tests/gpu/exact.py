"""`deterministic`: the same request gets the same tokens and log probabilities, bit for bit, along every road."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams
from penstock.models.spec import FAMILIES
from tests.gpu.answers import ask, ids
from tests.gpu.check import Figures, check, require
from tests.gpu.models import engine
from tests.same_tokens.roads import Answer, alone, chunked, displaced, shuffled, together

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
    "torch_dtype": "bfloat16",
}


def _small(architecture: str) -> dict[str, Any]:
    return {
        **FAMILIES[architecture].like[0],
        "architectures": [architecture],
        "initializer_range": 0.3,
        "max_position_embeddings": 2048,
    }


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (_small("LlamaForCausalLM"), {}),
    "llama-float32": (_small("LlamaForCausalLM"), {"dtype": "float32"}),
    "qwen3": (_small("Qwen3ForCausalLM"), {}),
    "gpt-oss": (_small("GptOssForCausalLM"), {}),
    "deepseek-v3": (_small("DeepseekV3ForCausalLM"), {}),
    "qwen3-moe-fp8": (_small("Qwen3MoeForCausalLM"), {"quantization": "fp8"}),
    "smollm2": (SMOLLM2, {}),
    "smollm2-fp8": (SMOLLM2, {"quantization": "fp8"}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "small steps": {"max_num_batched_tokens": 64},
    "no graphs": {"max_num_batched_tokens": 512, "enforce_eager": True},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_seqs": 24, "block_size": 32, "max_model_len": 2000},
    "one by one": {"max_num_seqs": 1},
}
NUM_PROMPTS, NUM_TOKENS, VOCABULARY = 64, 24, 60
_FOLDERS = tempfile.TemporaryDirectory(prefix="penstock-exact-")


def prompts() -> list[list[int]]:
    """Of 1 to 700 tokens, some sharing a beginning, a few longer than a part of attention."""
    rng = random.Random(5)
    common = [rng.randrange(3, VOCABULARY) for _ in range(640)]
    return [
        common[: rng.choice((0, 0, 0, 17, 300, 640))]
        + [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 60))]
        for _ in range(NUM_PROMPTS)
    ]


def params() -> list[SamplingParams]:
    """Greedy and drawn in turn; log probabilities show every bit."""
    return [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
        for i in range(NUM_PROMPTS)
    ]


def tokens(llm: LLM, order: list[int] | None = None) -> list[list[int]]:
    """Of those prompts, nothing more being asked."""
    order = list(range(NUM_PROMPTS)) if order is None else order
    given, each = prompts(), params()
    return ids(ask(llm, [given[i] for i in order], [each[i].clone(logprobs=None) for i in order]))


class Known:
    """A model, the answers its prompts get alone, and the tokens they get alone where nothing more is asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.llm = self.make()
        self.answers: list[Answer] = alone(self.llm, prompts(), params())
        self.tokens: list[list[int]] = []
        for i in range(NUM_PROMPTS):
            self.llm.reset_prefix_cache()
            self.tokens += tokens(self.llm, [i])

    def make(self, **options: Any) -> LLM:
        return make_exact(self.name, **options)


def make_exact(name: str, **options: Any) -> LLM:
    """A deterministic engine of one of the models."""
    config, own = MODELS[name]
    folder = Path(_FOLDERS.name) / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    usual: dict[str, Any] = {
        "load_format": "dummy",
        "deterministic": True,
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 256,
        "kv_cache_tokens": 80_000,
    }
    return engine(folder, **(usual | own | options))


_LAST: dict[str, Known] = {}


def known(name: str) -> Known:
    """The one before it is closed."""
    if name not in _LAST:
        for other in list(_LAST):
            _LAST.pop(other).llm.close()
        _LAST[name] = Known(name)
    return _LAST[name]


def _in_a_batch(one: Known) -> bool:
    one.llm.reset_prefix_cache()
    same = together(one.llm, prompts(), params()) == one.answers
    one.llm.reset_prefix_cache()
    return same and tokens(one.llm) == one.tokens and one.llm.stats()["max_batch_size"] >= 60


def _with_other_neighbours(one: Known) -> bool:
    one.llm.reset_prefix_cache()
    same = shuffled(one.llm, prompts(), params(), seed=1) == one.answers
    some = list(range(0, NUM_PROMPTS, 3))
    one.llm.reset_prefix_cache()
    return same and tokens(one.llm, some) == [one.tokens[i] for i in some]


def _in_random_chunks(one: Known) -> bool:
    one.llm.reset_prefix_cache()
    return chunked(one.llm, prompts()[:24], params()[:24], seed=2) == one.answers[:24]


def _from_the_prefix_cache(one: Known) -> bool:
    one.llm.reset_prefix_cache()
    tokens(one.llm)
    before = one.llm.stats()["num_cached_tokens"]
    same = tokens(one.llm) == one.tokens and together(one.llm, prompts(), params()) == one.answers
    return same and one.llm.stats()["num_cached_tokens"] > before + 1000


def _beside_an_engine_that_is_not(one: Known) -> bool:
    """What one engine of a process takes is no matter of another's."""
    with one.make(deterministic=False) as usual:
        tokens(usual, [3, 4])
        one.llm.reset_prefix_cache()
        return tokens(one.llm) == one.tokens


def _with_little_memory(one: Known) -> bool:
    """Rows wait for blocks, or are preempted where they keep all positions."""
    with one.make(kv_cache_tokens=1600) as small:
        same, stats = tokens(small) == one.tokens, small.stats()
        return same and (stats["num_preemptions"] > 0 or stats["max_batch_size"] < NUM_PROMPTS // 2)


def _displaced(one: Known) -> bool:
    """Every few steps somebody more important comes and takes a row."""
    with one.make(scheduling_policy="priority", max_num_seqs=4) as small:
        same = displaced(small, prompts()[:24], params()[:24]) == one.answers[:24]
        return same and small.stats()["num_preemptions"] > 5


ROADS: dict[str, Callable[[Known], bool]] = {
    "a batch": _in_a_batch,
    "other neighbours": _with_other_neighbours,
    "random chunks": _in_random_chunks,
    "the prefix cache": _from_the_prefix_cache,
    "beside a usual engine": _beside_an_engine_that_is_not,
    "little memory": _with_little_memory,
    "displaced": _displaced,
}


def _require_all(same: dict[str, bool]) -> Figures:
    require(
        all(same.values()),
        f"other answers, or another road than meant: "
        f"{', '.join(road for road, is_same in same.items() if not is_same)}",
    )
    return {"the same": ", ".join(same)}


@check([(name,) for name in MODELS])
def deterministic_along_every_road(name: str) -> Figures:
    one = known(name)
    different = len({answer for answer, _ in one.answers})
    require(different > NUM_PROMPTS // 2, f"only {different} of {NUM_PROMPTS} answers differ, which proves nothing")
    return _require_all({road: take(one) for road, take in ROADS.items()})


@check([(name,) for name in MODELS])
def deterministic_with_other_settings(name: str) -> Figures:
    one, same = known(name), {}
    for road, options in SETTINGS.items():
        with one.make(**options) as other:
            same[road] = (
                tokens(other) == one.tokens and together(other, prompts()[:16], params()[:16]) == one.answers[:16]
            )
    return _require_all(same)
