"""`penstock verify` compares a GPU's layers too: here those that a GPU would have, through Triton's interpreter."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton")

import penstock.ops.triton.bodies  # noqa: E402, F401  registers the bodies
from penstock.api.verify import layers  # noqa: E402
from penstock.api.verify.finding import Finding  # noqa: E402
from penstock.api.verify.layers import LayerDevice, compare_layers  # noqa: E402
from penstock.models import decoder, load  # noqa: E402
from penstock.models.decoder import Decoder  # noqa: E402
from penstock.models.spec import spec_from_config  # noqa: E402
from penstock.ops import OPS, OpTable  # noqa: E402
from penstock.ops.registry import Body  # noqa: E402
from penstock.ops.triton.attention.attention import tile_tokens  # noqa: E402
from penstock.passes.lower import RULES, Lower  # noqa: E402
from penstock.quant.dense import Matrix  # noqa: E402
from penstock.runner.memory import BlockMemory  # noqa: E402
from tests.passes.models import describe  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")
SEED = 3


class GpuMemory(BlockMemory):
    """Keys lie as on a GPU."""

    def views(self, memories: Any) -> list[Any]:
        self.keys_by_position = True
        return super().views(memories)


def compare(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    for module in (decoder, load):
        monkeypatch.setattr(module, "dense", Matrix)
    monkeypatch.setattr(layers, "BlockMemory", GpuMemory)
    monkeypatch.setattr(layers, "LENGTHS", (19, 3, 1))
    spec = spec_from_config(describe("Qwen3ForCausalLM", num_hidden_layers=2, vocab_size=96))
    model = load.load_model(None, spec, dummy_seed=SEED, finish=Lower(OpTable("cuda", False), False, RULES))
    assert isinstance(model, Decoder)
    settings: Any = SimpleNamespace(
        device="cpu", seed=SEED, block_size=8, kv_cache_dtype="float32", dtype="float32", quantization=None
    )
    return list(compare_layers(model, None, settings, LayerDevice(torch.device("cpu"), tile_tokens(4, 2))))


def test_layers_of_a_gpu_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = compare(monkeypatch)
    assert [finding.part for finding in findings] == ["embedding", "layer 0", "layer 1", "head"]
    assert all(finding.is_right and finding.test == "against float32" for finding in findings)
    assert all(0 < finding.error < 1e-4 for finding in findings[1:])


def test_a_wrong_kernel_shows_in_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OPS["attention"].bodies["cuda"].function
    wrong = Body(lambda *args, **options: 1.05 * right(*args, **options), exact=False)
    monkeypatch.setitem(OPS["attention"].bodies, "cuda", wrong)
    assert [finding.part for finding in compare(monkeypatch) if not finding.is_right] == ["layer 0", "layer 1"]
