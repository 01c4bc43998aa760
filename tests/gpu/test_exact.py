"""`deterministic`: the same request gets the same tokens and log probabilities on a GPU, bit for bit, along every road.

`pytest tests/ops/test_triton_exact.py` asks the same of each op.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

from penstock import LLM, SamplingParams  # noqa: E402
from penstock.models.registry import FAMILIES  # noqa: E402
from tests.same_tokens.roads import Answer, alone, chunked, displaced, shuffled, together  # noqa: E402

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_act": "silu",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": True,
    "initializer_range": 0.06, "torch_dtype": "bfloat16"}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({**FAMILIES["LlamaForCausalLM"].like[0], "architectures": ["LlamaForCausalLM"],
               "initializer_range": 0.3, "max_position_embeddings": 2048}, {}),
    "llama-float32": ({**FAMILIES["LlamaForCausalLM"].like[0], "architectures": ["LlamaForCausalLM"],
                       "initializer_range": 0.3, "max_position_embeddings": 2048}, {"dtype": "float32"}),
    "qwen3": ({**FAMILIES["Qwen3ForCausalLM"].like[0], "architectures": ["Qwen3ForCausalLM"],
               "initializer_range": 0.3, "max_position_embeddings": 2048}, {}),
    "smollm2": (SMOLLM2, {}),
    "smollm2-fp8": (SMOLLM2, {"quantization": "fp8"}),
}
NUM_PROMPTS, NUM_TOKENS, VOCABULARY = 64, 24, 60


def prompts() -> list[list[int]]:
    """Of 1 to 700 tokens, some sharing a beginning, a few longer than a part of attention."""
    rng = random.Random(5)
    common = [rng.randrange(3, VOCABULARY) for _ in range(640)]
    return [common[:rng.choice((0, 0, 0, 17, 300, 640))] + [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(
        1, 60))] for _ in range(NUM_PROMPTS)]


def params() -> list[SamplingParams]:
    """Greedy and drawn in turn; log probabilities show every bit, and make the host choose."""
    return [SamplingParams(temperature=i % 2, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1,
                           detokenize=False) for i in range(NUM_PROMPTS)]


def chosen_there(llm: LLM, order: list[int] | None = None) -> list[list[int]]:
    """Tokens that the device chooses itself."""
    plain = [one.clone(logprobs=None) for one in params()]
    order = list(range(NUM_PROMPTS)) if order is None else order
    outputs = llm.generate([prompts()[i] for i in order], [plain[i] for i in order], use_tqdm=False)  # type: ignore[arg-type]
    return [output.outputs[0].token_ids for output in outputs]


class Known:
    """A model, the answers its prompts get alone, and the tokens a device chooses for each alone."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options = str(folder), options
        self.llm: LLM = self.make()
        self.answers: list[Answer] = alone(self.llm, prompts(), params())
        self.tokens: list[list[int]] = []
        for i in range(NUM_PROMPTS):
            self.llm.reset_prefix_cache()
            self.tokens += chosen_there(self.llm, [i])

    def make(self, **options: Any) -> LLM:
        usual: dict[str, Any] = {
            "load_format": "dummy", "skip_tokenizer_init": True, "progress": False, "device": "cuda",
            "deterministic": True, "dtype": "bfloat16", "max_model_len": 1024, "kv_cache_tokens": 80_000}
        return LLM(self.folder, **(usual | self.options | options))


@pytest.fixture(scope="module", params=list(KINDS))
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    config, options = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(config))
    known = Known(folder, options)
    yield known
    known.llm.close()


def test_answers_vary(known: Known) -> None:
    """Else the comparisons below would prove nothing."""
    assert len({tokens for tokens, _ in known.answers}) > NUM_PROMPTS // 2


def test_batch_of_64(known: Known) -> None:
    known.llm.reset_prefix_cache()
    assert together(known.llm, prompts(), params()) == known.answers
    known.llm.reset_prefix_cache()
    assert chosen_there(known.llm) == known.tokens
    assert known.llm.stats()["max_batch_size"] >= 60


def test_other_neighbours(known: Known) -> None:
    known.llm.reset_prefix_cache()
    assert shuffled(known.llm, prompts(), params(), seed=1) == known.answers
    some = list(range(0, NUM_PROMPTS, 3))
    known.llm.reset_prefix_cache()
    assert chosen_there(known.llm, some) == [known.tokens[i] for i in some]


def test_random_chunks(known: Known) -> None:
    known.llm.reset_prefix_cache()
    assert chunked(known.llm, prompts()[:24], params()[:24], seed=2) == known.answers[:24]


def test_prefix_hits(known: Known) -> None:
    known.llm.reset_prefix_cache()
    chosen_there(known.llm)
    before = known.llm.stats()["num_cached_tokens"]
    assert chosen_there(known.llm) == known.tokens
    assert together(known.llm, prompts(), params()) == known.answers
    assert known.llm.stats()["num_cached_tokens"] > before + 1000


@pytest.mark.parametrize("options", [
    {"max_num_batched_tokens": 64}, {"max_num_batched_tokens": 512, "enforce_eager": True},
    {"enable_prefix_caching": False, "max_num_seqs": 24, "block_size": 32, "max_model_len": 2000},
    {"max_num_seqs": 1}], ids=lambda options: "-".join(options))
def test_other_settings(known: Known, options: dict[str, Any]) -> None:
    with known.make(**options) as other:
        assert chosen_there(other) == known.tokens
        assert together(other, prompts()[:16], params()[:16]) == known.answers[:16]


def test_out_of_memory(known: Known) -> None:
    with known.make(kv_cache_tokens=1600) as small:
        assert chosen_there(small) == known.tokens
        assert small.stats()["num_preemptions"] > 0


def test_displaced(known: Known) -> None:
    """Every few steps somebody more important comes and takes a row."""
    with known.make(scheduling_policy="priority", max_num_seqs=4) as small:
        assert displaced(small, prompts()[:24], params()[:24]) == known.answers[:24]
        assert small.stats()["num_preemptions"] > 5


def test_beside_an_engine_that_is_not(known: Known) -> None:
    """What one engine of a process takes is no matter of another's."""
    with known.make(deterministic=False) as usual:
        chosen_there(usual, [3, 4])
        known.llm.reset_prefix_cache()
        assert chosen_there(known.llm) == known.tokens
