"""EAGLE-3 heads in the format of vLLM's `speculators`: a nested config, layers.0, and norms in other places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.errors import InvalidConfig, InvalidModel
from penstock.runner.cpu.draft_lines import Line, LineMaker
from tests.draft.test_heads import (
    LAYERS,
    LIKE,
    OWN,
    VOCAB,
    WIDTH,
    Weights,
    make_prompts,
    make_weights,
    norm,
    open_llm,
    run_layer,
)
from tests.models import oracle
from tests.same_tokens.test_draft_models import AlwaysAhead

TAPS = [1, 3, 6]
DEFAULT = {"norm_before_residual": True, "norm_before_fc": False}
HEADS = {
    "as published": DEFAULT,
    "as they are trained now": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "EAGLE 3.1": {"norm_before_residual": False, "fc_norm": True, "norm_output": True},
    "none": {"norm_before_residual": False},
}


def save(folder: Path, norms: dict[str, Any], **more: Any) -> tuple[Any, Weights]:
    """Save a target and a head for it; returns the target and the head's tensors."""
    target = oracle.make("LlamaForCausalLM", LIKE)
    oracle.save(target, folder / "target")
    weights, generator = make_weights("eagle3"), torch.Generator().manual_seed(5)
    if norms.get("norm_before_fc"):
        weights["input_norm.weight"] = 1 + 0.2 * torch.randn(3 * WIDTH, generator=generator)
    if norms.get("fc_norm"):
        weights |= {f"fc_norm.{i}.weight": 1 + 0.2 * torch.randn(WIDTH, generator=generator) for i in range(3)}
    weights = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    weights["embed_tokens.weight"] = target.model.embed_tokens.weight.detach().clone()
    layer = {**LIKE, "num_hidden_layers": 1, "model_type": "llama", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    described = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": OWN,
        "eagle_aux_hidden_state_layer_ids": TAPS,
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"architectures": ["LlamaForCausalLM"]}},
        "target_hidden_size": None,
        "transformer_layer_config": layer,
        **norms,
        **more,
    }
    (folder / "heads").mkdir()
    (folder / "heads/config.json").write_text(json.dumps(described))
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "heads/model.safetensors")
    return target, weights


@torch.no_grad()
def draft(w: Weights, norms: dict[str, Any], target: Any, tokens: list[int], count: int) -> list[int]:
    """The likeliest draft tokens after `tokens`, by plain PyTorch."""
    states = target.model(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
    inputs = [states[tap][0] for tap in TAPS]
    if norms.get("fc_norm"):
        inputs = [norm(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(inputs)]
    whole: Tensor = torch.cat(inputs, -1)
    if norms.get("norm_before_fc"):
        whole = norm(whole, w["input_norm.weight"])
    features, known = whole @ w["fc.weight"].T, list(tokens)
    for _ in range(count):
        rows = target.model.embed_tokens(torch.tensor(known[1:]))
        normed = norm(features, w["layers.0.hidden_norm.weight"])
        given = torch.cat([norm(rows, w["layers.0.input_layernorm.weight"]), normed], -1)
        out = run_layer(w, "layers.0.", normed if norms["norm_before_residual"] else features, given)
        logits = torch.full((VOCAB,), -torch.inf)
        logits[w["d2t"] + torch.arange(OWN)] = w["lm_head.weight"] @ norm(out[-1], w["norm.weight"])
        known.append(int(logits.argmax()))
        fed = norm(out[-1:], w["norm.weight"]) if norms.get("norm_output") else out[-1:]
        features = torch.cat([features, fed])
    return known[len(tokens) :]


@pytest.mark.parametrize("kind", HEADS)
def test_the_same_drafts_as_plain_pytorch(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = HEADS[kind]
    target, weights = save(tmp_path, norms)
    seen: list[tuple[list[int], list[int]]] = []
    end = LineMaker.end

    def note(self: LineMaker, lines: list[Line]) -> None:
        end(self, lines)
        seen.extend((list(line.device.state.tokens), [draft.token for draft in line.drafts]) for line in lines)

    monkeypatch.setattr(LineMaker, "end", note)
    asked = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
    with open_llm(tmp_path, {"model": str(tmp_path / "heads")}, max_num_batched_tokens=40) as llm:
        scheduler: Any = llm.service.engine.scheduler
        scheduler._speculation = AlwaysAhead()
        answers = [output.outputs[0].token_ids for output in llm.generate(make_prompts(), asked, use_tqdm=False)]
        drafter: Any = llm.service.engine.executor.drafter  # type: ignore[attr-defined]
        assert drafter.net.name == "eagle3" and not drafter._has_failed  # found by its architecture
    assert len(seen) > 30
    for tokens, line in seen[::2]:
        assert line == draft(weights, norms, target, tokens, len(line)) and line
    plain: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_tokens": 2048,
        "skip_tokenizer_init": True,
        "progress": False,
    }
    with LLM(str(tmp_path / "target"), speculative_config=None, **plain) as llm:
        assert answers == [one.outputs[0].token_ids for one in llm.generate(make_prompts(), asked, use_tqdm=False)]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type='dflash' is not supported"),
        ({"transformer_layer_config": None}, "a transformer_layer_config alone"),
        ({"embed_requires_grad": True}, "a head uses the model's embedding"),
        ({"norm_output": "yes"}, "norm_output='yes' must be true or false"),
        ({"eagle_aux_hidden_state_layer_ids": [1, LAYERS]}, "must list layers of the model, which has 8"),
        ({"transformer_layer_config": {**LIKE, "hidden_size": 32}}, "hidden states of 32 values, the model has 64"),
    ],
)
def test_what_is_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    save(tmp_path, DEFAULT, **more)
    with pytest.raises((InvalidModel, InvalidConfig), match=words):
        open_llm(tmp_path, {"method": "eagle3", "model": str(tmp_path / "heads")})
