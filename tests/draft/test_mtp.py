"""DeepSeek-V3's MTP layer, with latent attention and experts, against the layers of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.errors import InvalidConfig
from penstock.models.load import MIN_QUANTIZED_WIDTH
from penstock.models.spec import FAMILIES
from penstock.quant.packed import Packed
from penstock.runner.cpu.draft_lines import Line, LineMaker
from tests.draft.test_heads import make_prompts, norm
from tests.models import oracle
from tests.same_tokens.test_draft_models import LENGTH, AlwaysAhead

V3 = "DeepseekV3ForCausalLM"
LIKE = {**FAMILIES[V3].like[0], "vocab_size": 320}
LAYERS, WIDTH = 3, 64
PREFIX = f"model.layers.{LAYERS}."


def save_target(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Save a model whose last layer became its MTP layer; return it with all its layers, and the parts of that one."""
    folder.mkdir(parents=True, exist_ok=True)
    model = oracle.make(V3, LIKE | {"num_hidden_layers": LAYERS + 1})
    oracle.save(model, folder)
    generator = torch.Generator().manual_seed(3)
    own = {name: 1 + 0.2 * torch.randn(WIDTH, generator=generator) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj"] = 0.15 * torch.randn(WIDTH, 2 * WIDTH, generator=generator)
    copies = {"embed_tokens": model.model.embed_tokens.weight, "shared_head.head": model.lm_head.weight}
    tensors = {f"{PREFIX}{name}.weight": tensor.detach().clone() for name, tensor in {**own, **copies}.items()}
    save_file({**load_file(folder / "model.safetensors"), **tensors}, folder / "model.safetensors")
    config = folder / "config.json"
    config.write_text(
        config.read_text().replace(f'"num_hidden_layers": {LAYERS + 1}', f'"num_hidden_layers": {LAYERS}')
    )
    return model, own


def run_layer(model: Any, x: Tensor) -> Tensor:
    """The last layer, on x[T, C] at positions from 0 on."""
    positions = torch.arange(len(x))[None]
    turned = model.model.rotary_emb(x[None], position_ids=positions)
    mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
    out = model.model.layers[-1](x[None], attention_mask=mask, position_ids=positions, position_embeddings=turned)
    return (out[0] if isinstance(out, tuple) else out).view(len(x), -1)


@torch.no_grad()
def draft(model: Any, own: dict[str, Tensor], tokens: list[int], count: int) -> list[int]:
    """The likeliest draft tokens after `tokens`."""
    known, inner = list(tokens), model.model
    kept = inner.layers
    inner.layers = kept[:LAYERS]
    features = inner(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
    inner.layers = kept
    for _ in range(count):
        rows = norm(inner.embed_tokens(torch.tensor(known[1:])), own["enorm"])
        x = torch.cat([rows, norm(features, own["hnorm"])], -1) @ own["eh_proj"].T
        out = norm(run_layer(model, x), own["shared_head.norm"])
        known.append(int((model.lm_head.weight @ out[-1]).argmax()))
        features = torch.cat([features, out[-1:]])
    return known[len(tokens) :]


def open_llm(folder: Path, speculation: dict[str, Any] | None, **options: Any) -> LLM:
    options = {"dtype": "float32", "kv_cache_tokens": 2048, "skip_tokenizer_init": True, "progress": False, **options}
    config = speculation and {**speculation, "num_speculative_tokens": LENGTH}
    llm = LLM(str(folder), speculative_config=config, **options)
    if speculation:
        scheduler: Any = llm.service.engine.scheduler
        scheduler._speculation = AlwaysAhead()
    return llm


def test_the_same_drafts_as_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = save_target(tmp_path)
    seen: list[tuple[list[int], list[int]]] = []
    end = LineMaker.end

    def note(self: LineMaker, lines: list[Line]) -> None:
        end(self, lines)
        seen.extend((list(line.device.state.tokens), [draft.token for draft in line.drafts]) for line in lines)

    monkeypatch.setattr(LineMaker, "end", note)
    asked = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
    with open_llm(tmp_path, {"method": "mtp"}, max_num_batched_tokens=40) as llm:
        for _ in range(2):
            llm.generate(make_prompts(), asked, use_tqdm=False)
        assert not llm.service.engine.executor.drafter._has_failed  # type: ignore[attr-defined]
    assert len(seen) > 40
    for tokens, line in seen[::3]:
        assert line == draft(model, own, tokens, len(line)) and line


@pytest.mark.parametrize("tree", [False, True], ids=["line", "tree"])
def test_answers_are_the_same(tmp_path: Path, tree: bool) -> None:
    save_target(tmp_path)
    asked = [
        SamplingParams(max_tokens=20, temperature=t, seed=i, ignore_eos=True, detokenize=False, logprobs=1, n=1 + i % 2)
        for i, t in enumerate((0.0, 1.0, 0.7, 0.0))
    ]
    found = []
    for speculation in (None, {"method": "mtp", "tree": tree}):
        with open_llm(tmp_path, speculation, kv_cache_tokens=320, max_model_len=112) as llm:
            outputs = [output for _ in range(2) for output in llm.generate(make_prompts(2), asked, use_tqdm=False)]
            found.append([[(one.token_ids, str(one.logprobs)) for one in output.outputs] for output in outputs])
            assert not speculation or llm.stats()["num_draft_tokens"] > 60
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_layer_is_stored_as_the_model_is(tmp_path: Path, kind: str) -> None:
    """Its experts too; beside a packed target a dense layer would be as large as several of the target's."""
    save_target(tmp_path)
    asked = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
    found = []
    for speculation in (None, {"method": "mtp"}):
        with open_llm(tmp_path, speculation, dtype="auto", quantization=kind) as llm:
            found.append([one.outputs[0].token_ids for one in llm.generate(make_prompts(), asked, use_tqdm=False)])
            if speculation:
                executor: Any = llm.service.engine.executor
                block = executor.drafter.net._block
                held = [linear.scheme for name, linear in block.mixer.linears()]
                held = [one for one in held if one.num_in >= MIN_QUANTIZED_WIDTH]
                held += [stack.scheme for stack in block.ffn.stacks()]
                assert len(held) > 4 and all(isinstance(scheme, Packed) for scheme in held)
                assert llm.stats()["num_draft_tokens"] > 20
    assert found[0] == found[1]


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    oracle.save(oracle.make(V3, LIKE), tmp_path)
    with pytest.raises(InvalidConfig, match=r"has no MTP layer \(model.mtp_layers.0, or model.layers.3\)"):
        open_llm(tmp_path, {"method": "mtp"})
