"""The GPU's runner with exact bodies alone, its kernels run by Triton's interpreter: the same bits along every road."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

from penstock import LLM, SamplingParams  # noqa: E402
from penstock.errors import InvalidConfig  # noqa: E402
from penstock.layers import HeadProduct  # noqa: E402
from penstock.models import decoder, load  # noqa: E402
from penstock.ops import OPS  # noqa: E402
from penstock.quant.dense import Matrix  # noqa: E402
from penstock.runner.cuda.runner import CudaRunner  # noqa: E402
from penstock.runner.memory import BlockMemory  # noqa: E402
from tests.llm.tiny import dummy, runner, write_config  # noqa: E402
from tests.ops.interpreter import steady_dots  # noqa: E402, F401  a fixture
from tests.runner.test_cuda_drafts import Drafting, wait_for_drafts  # noqa: E402
from tests.runner.test_cuda_runner import Moment  # noqa: E402
from tests.same_tokens.roads import alone, together  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")
HOST = ("log_softmax", "argmax", "above", "weight_sums")  # these choose tokens there
SEQUENCES, TOKENS = 2, 24
PROMPTS = [[5, 9, 11], [(j * j) % 60 + 3 for j in range(21)]]
PARAMS = [
    SamplingParams(temperature=i, seed=i, max_tokens=3, ignore_eos=True, logprobs=1, detokenize=False) for i in range(2)
]


class Memory(BlockMemory):
    """Keys lie as on a GPU, and one block is nobody's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.keys_by_position = True


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, steady_dots: None) -> Iterator[None]:  # noqa: F811
    """A CPU has a GPU's exact bodies, and those alone."""
    for name, op in OPS.items():
        if name not in HOST:
            exact = {"cpu": op.exact_bodies["cuda"]} if "cuda" in op.exact_bodies else {}
            monkeypatch.setattr(op, "exact_bodies", exact)
    for module in (decoder, load):
        monkeypatch.setattr(module, "dense", Matrix)
    monkeypatch.setattr(decoder, "hold_heads", HeadProduct)
    monkeypatch.setattr(
        "penstock.runner.cuda.runner.ThreadPoolExecutor",  # the interpreter is one at a time
        lambda num, **options: ThreadPoolExecutor(1, **options),
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))
    yield


def deterministic(folder: str) -> LLM:
    llm = dummy(folder, max_num_seqs=SEQUENCES, max_num_batched_tokens=TOKENS, kv_cache_dtype="float32")
    theirs = runner(llm.service)
    theirs.model.ops.exact = True
    memory = Memory(len(theirs.memory.blocks) + 1, 16, theirs.memory.grouping, "float32")
    made = CudaRunner(theirs.model, memory, None, SEQUENCES, TOKENS, True, True)  # type: ignore[arg-type]
    made.warm()
    engine: Any = llm.service.engine
    engine.executor, engine.overlap = made, 1
    return llm


SLOW = ("Qwen3ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM")


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_the_same_bits_along_every_road(on_device: None, tmp_path: Path, architecture: str) -> None:
    """Alone, then together in chunks, then from the prefix cache."""
    changed = {"num_hidden_layers": 1, **({"first_k_dense_replace": 0} if "Deepseek" in architecture else {})}
    with deterministic(write_config(tmp_path, architecture, **changed)) as llm:
        expected = alone(llm, PROMPTS, PARAMS)
        llm.reset_prefix_cache()
        llm.service.engine.scheduler.max_num_batched_tokens = 9
        assert together(llm, PROMPTS, PARAMS) == expected
        before = llm.stats()["num_cached_tokens"]
        assert together(llm, PROMPTS, PARAMS) == expected
        assert llm.stats()["num_cached_tokens"] > before


def test_drafts_keep_every_bit(on_device: None, tmp_path: Path) -> None:
    """Tokens and log probabilities of verified drafts, right ones and wrong ones, together and alone: those of one
    token at a time. Breaks when a kernel's sums depend on how many positions of a row it computes."""
    params = [one.clone(max_tokens=7) for one in PARAMS]
    with deterministic(write_config(tmp_path, "LlamaForCausalLM", num_hidden_layers=1)) as llm:
        expected = alone(llm, PROMPTS, params)
        engine: Any = llm.service.engine
        wait_for_drafts(engine)
        known: dict[tuple[int, ...], Sequence[int]] = {
            tuple(prompt): answer[0] for prompt, answer in zip(PROMPTS, expected)
        }
        drafting = engine.executor = Drafting(engine.executor, known)
        assert alone(llm, PROMPTS, params) == expected
        llm.reset_prefix_cache()
        assert together(llm, PROMPTS, params) == expected
        stats = llm.stats()
        assert stats["num_draft_tokens"] > stats["num_accepted_tokens"] > 8 and not drafting.errors


def test_a_model_without_exact_bodies_is_refused(
    on_device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OPS["rms_norm"], "exact_bodies", {})
    with pytest.raises(InvalidConfig, match="op rms_norm has no deterministic cpu kernel: leave deterministic out"):
        deterministic(write_config(tmp_path, num_hidden_layers=1))
