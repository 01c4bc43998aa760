"""Every family as a GPU would compute it, without a GPU: matrices held its way, its kernels through Triton's
interpreter, a paged cache with keys beside each other, against the same model with the references alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the tests of its kernels need it
pytest.importorskip("triton")

import triton  # noqa: E402

import penstock.ops.triton.bodies  # noqa: E402, F401  registers the bodies
from penstock import layers, ops  # noqa: E402
from penstock.layers import KvCache  # noqa: E402
from penstock.models import decoder, load, reading  # noqa: E402
from penstock.models.decoder import Decoder, Encoder  # noqa: E402
from penstock.models.load import load_model  # noqa: E402
from penstock.models.memory import KvMemory, LatentMemory  # noqa: E402
from penstock.models.spec import FAMILIES, spec_from_config  # noqa: E402
from penstock.ops import OpTable, registry  # noqa: E402
from penstock.ops.triton.attention import latent  # noqa: E402
from penstock.ops.triton.attention.attention import tile_tokens  # noqa: E402
from penstock.ops.triton.experts import grouped_product  # noqa: E402
from penstock.ops.triton.matmul import product  # noqa: E402
from penstock.passes.lower import RULES, Lower, Rule, products  # noqa: E402
from penstock.quant.dense import Matrix  # noqa: E402
from penstock.runner.step import Step  # noqa: E402
from tests.models.paged import Paged, Row  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")
# The others are these with other numbers; tests/models and tests/passes run every one.
DEFAULT = ("Llama", "Qwen3", "Gemma3", "GPT2LMHead", "Bloom", "Falcon")
CASES = [
    pytest.param(
        name,
        number,
        id=f"{name}-{number}",
        marks=[pytest.mark.slow] * (number > 0 or not re.match(f"({'|'.join(DEFAULT)})(For|Model)", name)),
    )
    for name, family in FAMILIES.items()
    for number in range(len(family.like))
    if not family.cpu_only and name != "BertModel"
]
NUM_NEW = 2
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [200]]


class OnGpu(Paged):
    """Work dealt out as the GPU's runner does, and no number on its way back to the host."""

    checks_ends = False  # its bits depend on the company

    def __init__(self, model: Decoder, forbidden: pytest.MonkeyPatch) -> None:
        super().__init__(model)
        self._forbidden = forbidden
        self._tile = min(
            tile_tokens(memory.num_heads, memory.num_kv_heads)
            if isinstance(memory, KvMemory)
            else latent.tile_tokens(memory.num_heads, self.memory.blocks.device)
            for memory in model.spec.memories()
            if isinstance(memory, KvMemory | LatentMemory)
        )
        for cache in self.caches:
            if isinstance(cache, KvCache):
                cache.k = cache.k.transpose(2, 3).contiguous().transpose(2, 3)
        forward, model.forward = model.forward, self._forward  # type: ignore[method-assign, assignment]
        self._computes = forward

    def _forward(self, step: Step, caches: Any) -> torch.Tensor:
        def refuse(*_: Any) -> None:
            raise AssertionError("a step that may be recorded waits for the device")

        with self._forbidden.context() as patch:
            for name in ("tolist", "item", "nonzero", "cpu"):
                patch.setattr(torch.Tensor, name, refuse)
            return self._computes(step, caches)

    def _step(self, work: Sequence[tuple[Row, int]]) -> Step:
        step = super()._step(work)
        counts = [count for _, count in work]
        tiles = [(s, first) for s, count in enumerate(counts) for first in range(0, count, self._tile)]
        single = all(count == 1 for count in counts)
        step.work = ops.Work(
            len(counts) if single else 0, None if single else torch.tensor(tiles, dtype=torch.int32), 2 if single else 1
        )
        return step


class References(Paged):
    checks_ends = False


def config(architecture: str, variant: int) -> dict[str, Any]:
    return {"architectures": [architecture], **FAMILIES[architecture].like[variant], "initializer_range": 0.15}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Matrices are stored as on a GPU."""
    for module in (decoder, load):
        monkeypatch.setattr(module, "dense", Matrix)
    monkeypatch.setattr(decoder, "hold_heads", layers.HeadProduct)
    # The interpreter takes as long for one output as for many.
    for module, name in ((product, "gemv_shape"), (grouped_product, "grouped_gemv_shape")):
        monkeypatch.setattr(module, name, lambda width, *_: (64, triton.next_power_of_2(width), 4))
    yield


def loaded(
    described: dict[str, Any], monkeypatch: pytest.MonkeyPatch, device: str = "cuda", rules: Sequence[Rule] = RULES
) -> Decoder | Encoder:
    """Random weights, those of norms too, on the CPU, with the bodies and fusions of a device."""
    usual = reading.from_seed

    def varied(*given: Any) -> reading.Take:
        take = usual(*given)
        return lambda name: take(name) + (torch.linspace(-0.3, 0.3, len(take(name))) if take(name).ndim == 1 else 0)

    with monkeypatch.context() as patch:
        patch.setattr(reading, "from_seed", varied)
        ops = OpTable(device)
        finish = Lower(ops, rules=rules)
        return load_model(None, spec_from_config(described), dummy_seed=3, finish=finish)


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("Qwen3ForCausalLM", "Gemma2ForCausalLM")),
    ],
)
def test_norms_left_to_whoever_reads_the_product(
    architecture: str, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU does it with few rows in bfloat16, here in float32."""
    calls: list[int] = []

    def can_defer_norm(x: torch.Tensor, norm: object, bias: object, eps: float) -> bool:
        calls.append(x.shape[0])
        return eps > 0 and norm is None and bias is None and x.shape[0] > 1

    for module in (product, products):
        monkeypatch.setattr(module, "can_defer_norm", can_defer_norm)
    monkeypatch.setattr(products, "FOLDED_BYTES", 4)
    test_every_family(architecture, 0, kernels, monkeypatch)
    assert max(calls) > 1


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_every_family(architecture: str, variant: int, kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    described = config(architecture, variant)
    model = loaded(described, monkeypatch)
    assert isinstance(model, Decoder)
    driver = OnGpu(model, monkeypatch)
    rows = driver.run(PROMPTS, NUM_NEW, chunk=64) + driver.run(PROMPTS[1:], 1, chunk=64)
    monkeypatch.undo()
    monkeypatch.setattr(registry, "REFERENCE_ONLY", {"cpu"})
    reference = loaded(described, monkeypatch, "cpu", rules=())
    assert isinstance(reference, Decoder)
    for row in rows:
        expected = References(reference).run([row.tokens[:-1]], 1, chunk=64)[0].logits
        found = torch.stack(row.logits)
        assert (found - torch.stack(expected)).abs().max() < 2e-4 * found.abs().max() and found.std() > 0.1


def test_the_encoder(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    described = config("BertModel", 0)
    sequences = [[5, 6, 7, 8, 9, 10, 11], [200], [*range(60)]]
    counts = [len(sequence) for sequence in sequences]
    step = Step(
        torch.tensor([token for sequence in sequences for token in sequence]),
        torch.tensor([p for count in counts for p in range(count)]),
        [],
        [],
        torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        torch.tensor(counts, dtype=torch.int32),
    )
    results = []
    for device, rules in (("cuda", RULES), ("cpu", [])):
        model = loaded(described, monkeypatch, device, rules)
        assert isinstance(model, Encoder)
        results.append(model.pool(model.forward(step), step.query_start))
        monkeypatch.undo()
        monkeypatch.setattr(registry, "REFERENCE_ONLY", {"cpu"})
    assert (results[0] - results[1]).abs().max() < 1e-5 and results[0].std() > 0.05
