"""Heads of every method on every tiny family: answers are those without drafts, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.models.spec import FAMILIES
from penstock.runner.cpu.draft_lines import LineDrafter
from tests.same_tokens.roads import alone, chunked, tiny_llm, tiny_model, together
from tests.same_tokens.test_draft_models import AlwaysAhead, params, prompts

QUICK = ("Gemma2ForCausalLM", "MixtralForCausalLM")
METHODS = ("medusa", "eagle", "eagle3")
HIDDEN, NUM_HEADS = 32, 2


def save_heads(folder: Path, method: str, width: int, vocab_size: int, num_layers: int) -> dict[str, Any]:
    """Save random heads for hidden states of this width; returns the options for speculation."""
    taps, wide = [0, num_layers - 1], 2 if method == "eagle3" else 1
    shapes: dict[str, tuple[int, ...]] = {}
    if method == "medusa":
        for i in range(3):
            shapes |= {f"{i}.0.linear.weight": (width, width), f"{i}.0.linear.bias": (width,)}
            shapes[f"{i}.1.weight"] = (vocab_size, width)
    else:
        layer: dict[str, tuple[int, ...]] = {f"self_attn.{part}_proj.weight": (width, wide * width) for part in "qkv"}
        layer |= {f"mlp.{part}_proj.weight": (HIDDEN, width) for part in ("gate", "up")}
        layer |= {"self_attn.o_proj.weight": (width, width), "mlp.down_proj.weight": (width, HIDDEN)}
        layer["post_attention_layernorm.weight"] = (width,)
        if method == "eagle3":
            layer |= {"hidden_norm.weight": (width,), "input_layernorm.weight": (width,)}
            shapes |= {"norm.weight": (width,), "lm_head.weight": (vocab_size, width)}
        shapes |= {"fc.weight": (width, len(taps) * width)} | {f"layers.0.{name}": one for name, one in layer.items()}
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: 0.15 * torch.randn(shape, generator=generator) + ("norm" in name) for name, shape in shapes.items()
    }
    described = {
        "hidden_size": width,
        "intermediate_size": HIDDEN,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "vocab_size": vocab_size,
        "eagle_aux_hidden_state_layer_ids": taps,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return {"method": method, "model": str(folder), "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in sorted(FAMILIES)]
)
def test_every_family(tmp_path: Path, architecture: str) -> None:
    model = tiny_model(tmp_path / "target", architecture)
    with tiny_llm(model) as llm:
        spec: Any = llm.service.engine.executor.model.spec  # type: ignore[attr-defined]
        if spec.is_encoder or any(state and state.kind == "recurrent" for state in spec.states()):
            pytest.skip("it cannot verify drafts")
        if spec.width % (16 * NUM_HEADS):
            pytest.skip("its width has no such heads")
        answers = alone(llm, prompts(), params())
    for method in METHODS:
        config = save_heads(tmp_path / method, method, spec.width, spec.vocab_size, spec.num_layers)
        with tiny_llm(model, speculative_config=config) as llm:
            scheduler: Any = llm.service.engine.scheduler
            scheduler._speculation = AlwaysAhead()
            assert together(llm, prompts(), params()) == answers, method
            assert chunked(llm, prompts(), params(), seed=2) == answers, method
            executor: Any = llm.service.engine.executor
            assert isinstance(executor.drafter, LineDrafter) and not executor.drafter._has_failed
            assert llm.stats()[f"num_draft_tokens_of_{method}"] > 20
