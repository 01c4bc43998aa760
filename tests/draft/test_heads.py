"""Medusa, EAGLE, EAGLE-3 and MTP against plain PyTorch: the same drafts from the same published tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.engine.draft_tree import find_paths, is_line
from penstock.engine.plan import Draft
from penstock.errors import InvalidConfig, InvalidModel
from penstock.models.files.vocabulary import read_vocabulary
from penstock.runner.cpu.draft_branches import BranchMaker
from penstock.runner.cpu.draft_lines import Line, LineMaker
from tests.models import oracle
from tests.same_tokens.test_draft_models import LENGTH, AlwaysAhead

LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, VOCAB, OWN = 8, 64, 96, 4, 2, 320, 100
LIKE = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=512,
)
SIZE = WIDTH // HEADS
Weights = dict[str, Tensor]
METHODS = ["medusa", "eagle", "eagle3", "mtp"]


def layer_shapes(wide: int = 1) -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj.weight": (WIDTH, wide * WIDTH),
        "self_attn.k_proj.weight": (KV_HEADS * SIZE, wide * WIDTH),
        "self_attn.v_proj.weight": (KV_HEADS * SIZE, wide * WIDTH),
        "self_attn.o_proj.weight": (WIDTH, WIDTH),
        "mlp.gate_proj.weight": (HIDDEN, WIDTH),
        "mlp.up_proj.weight": (HIDDEN, WIDTH),
        "mlp.down_proj.weight": (WIDTH, HIDDEN),
        "post_attention_layernorm.weight": (WIDTH,),
    }


def shapes(method: str) -> dict[str, tuple[int, ...]]:
    """Tensors under the names that published checkpoints have."""
    if method == "medusa":
        heads = range(3)
        return {f"{i}.0.linear.weight": (WIDTH, WIDTH) for i in heads} | {
            **{f"{i}.0.linear.bias": (WIDTH,) for i in heads},
            **{f"{i}.1.weight": (VOCAB, WIDTH) for i in heads},
        }
    if method == "eagle":
        layer = {f"layers.0.{name}": shape for name, shape in layer_shapes().items()}
        return {**layer, "fc.weight": (WIDTH, 2 * WIDTH), "fc.bias": (WIDTH,), "embed_tokens.weight": (VOCAB, WIDTH)}
    if method == "eagle3":
        norms = {f"midlayer.{name}.weight": (WIDTH,) for name in ("hidden_norm", "input_layernorm")}
        layer = {f"midlayer.{name}": shape for name, shape in layer_shapes(2).items()}
        outer = {"fc.weight": (WIDTH, 3 * WIDTH), "norm.weight": (WIDTH,), "lm_head.weight": (OWN, WIDTH)}
        return {**norms, **layer, **outer}
    names = ("input_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm")
    own = {**layer_shapes(), **{f"{name}.weight": (WIDTH,) for name in names}, "input_proj.weight": (WIDTH, 2 * WIDTH)}
    kv = KV_HEADS * SIZE
    own |= {f"self_attn.{part}_proj.bias": (rows,) for part, rows in (("q", WIDTH), ("k", kv), ("v", kv))}
    return {f"model.mtp_layers.0.{name}": shape for name, shape in own.items()}


def make_weights(method: str) -> Weights:
    generator = torch.Generator().manual_seed(3)
    made = {
        name: torch.randn(shape, generator=generator) * (0.15 if len(shape) > 1 else 0.2)
        + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes(method).items()
    }
    if method == "eagle3":
        ids = torch.randperm(VOCAB, generator=generator)[:OWN].sort().values
        made |= {"d2t": ids - torch.arange(OWN), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    return made


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def turn(x: Tensor) -> Tensor:
    """Rotate x[T, H, D] by its positions, as Llama does."""
    frequencies = 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.arange(len(x))[:, None] * frequencies
    cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def run_layer(w: Weights, prefix: str, x: Tensor, given: Tensor) -> Tensor:
    """A decoder layer on x[T, C] whose attention reads `given`."""
    q, k, v = (
        F.linear(given, w[f"{prefix}self_attn.{part}_proj.weight"], w.get(f"{prefix}self_attn.{part}_proj.bias"))
        for part in "qkv"
    )
    q, k, v = turn(q.view(len(x), HEADS, SIZE)), turn(k.view(len(x), KV_HEADS, SIZE)), v.view(len(x), KV_HEADS, SIZE)
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(0, 1).reshape(len(x), WIDTH) @ w[f"{prefix}self_attn.o_proj.weight"].T
    z = norm(x, w[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (z @ w[f"{prefix}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return x + (F.silu(gate) * up) @ w[f"{prefix}mlp.down_proj.weight"].T


def run_eagle(w: Weights, rows: Tensor, features: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features [T, C] and the last logits of tokens' rows and features."""
    x = F.linear(torch.cat([rows, features], -1), w["fc.weight"], w["fc.bias"])
    out = run_layer(w, "layers.0.", x, x)
    return out, head @ out[-1]


def run_eagle3(w: Weights, rows: Tensor, features: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    given = [norm(rows, w["midlayer.input_layernorm.weight"]), norm(features, w["midlayer.hidden_norm.weight"])]
    out = run_layer(w, "midlayer.", features, torch.cat(given, -1))
    logits = torch.full((VOCAB,), -torch.inf)
    logits[w["d2t"] + torch.arange(OWN)] = w["lm_head.weight"] @ norm(out[-1], w["norm.weight"])
    return out, logits


def run_mtp(w: Weights, rows: Tensor, features: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    p = "model.mtp_layers.0."
    pair = [norm(features, w[f"{p}hidden_layernorm.weight"]), norm(rows, w[f"{p}token_layernorm.weight"])]
    x = torch.cat(pair, -1) @ w[f"{p}input_proj.weight"].T
    out = run_layer(w, p, x, norm(x, w[f"{p}input_layernorm.weight"]))
    out = norm(out, w[f"{p}final_layernorm.weight"])
    return out, head @ out[-1]


Run = Callable[[Weights, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
RUN: dict[str, Run] = {"eagle": run_eagle, "eagle3": run_eagle3, "mtp": run_mtp}


@torch.no_grad()
def draft(method: str, w: Weights, target: Any, tokens: list[int], count: int, path: Sequence[int] = ()) -> list[int]:
    """The likeliest draft tokens after `tokens`, by plain PyTorch; the first of them are those of `path`."""
    states = target.model(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
    hidden, head = states[-1][0], target.lm_head.weight
    if method == "medusa":
        last, line = hidden[-1], []
        for i in range(min(count, 3)):
            x = last + F.silu(F.linear(last, w[f"{i}.0.linear.weight"], w[f"{i}.0.linear.bias"]))
            line.append(int((w[f"{i}.1.weight"] @ x).argmax()))
        return line
    features, known = hidden, list(tokens)
    if method == "eagle3":
        taps = [states[layer][0] for layer in (2, LAYERS // 2, LAYERS - 3)]
        features = torch.cat(taps, -1) @ w["fc.weight"].T
    for i in range(count):
        rows = target.model.embed_tokens(torch.tensor(known[1:]))
        out, logits = RUN[method](w, rows, features, head)
        known.append(path[i] if i < len(path) else int(logits.argmax()))
        features = torch.cat([features, out[-1:]])
    return known[len(tokens) :]


def save_target(folder: Path, method: str, kind: str = "LlamaForCausalLM", **like: Any) -> tuple[Any, dict[str, Any]]:
    """Save a tiny model of this kind and heads for it; returns the model and the options for speculation."""
    architecture = "MiMoForCausalLM" if method == "mtp" else kind
    target = oracle.make(architecture, LIKE | like)
    oracle.save(target, folder / "target")
    weights, heads = make_weights(method), folder / "heads"
    if method == "mtp":
        described = json.loads((folder / "target/config.json").read_text())
        described |= {"architectures": [architecture], "num_nextn_predict_layers": 1, "attention_bias": True}
        (folder / "target/config.json").write_text(json.dumps(described))
        save_file({**load_file(folder / "target/model.safetensors"), **weights}, folder / "target/model.safetensors")
        return target, {"method": "mtp"}
    heads.mkdir()
    own = {"eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": OWN}}.get(method, {})
    (heads / "config.json").write_text(json.dumps({**LIKE, "num_hidden_layers": 1, **own}))
    name = "medusa_lm_head.safetensors" if method == "medusa" else "model.safetensors"
    save_file({key: value.contiguous() for key, value in weights.items()}, heads / name)
    return target, {"method": method, "model": str(heads)}


def open_llm(folder: Path, speculation: dict[str, Any], **options: Any) -> LLM:
    options = {"dtype": "float32", "kv_cache_tokens": 2048, "skip_tokenizer_init": True, "progress": False, **options}
    config = {**speculation, "num_speculative_tokens": LENGTH}
    return LLM(str(folder / "target"), speculative_config=config, **options)


def make_prompts(seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(count)] for count in (5, 70, 23, 1)]


@pytest.mark.parametrize("method", METHODS)
def test_the_same_drafts_as_plain_pytorch(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, several rows at once, prefixes cached: each line is the one of the whole text."""
    target, speculation = save_target(tmp_path, method)
    weights = make_weights(method)
    seen: list[tuple[list[int], list[int]]] = []
    end = LineMaker.end

    def note(self: LineMaker, lines: list[Line]) -> None:
        end(self, lines)
        seen.extend((list(line.device.state.tokens), [draft.token for draft in line.drafts]) for line in lines)

    monkeypatch.setattr(LineMaker, "end", note)
    with open_llm(tmp_path, speculation, max_num_batched_tokens=40) as llm:
        scheduler: Any = llm.service.engine.scheduler
        scheduler._speculation = AlwaysAhead()
        asked = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
        for _ in range(2):
            llm.generate(make_prompts(), asked, use_tqdm=False)
        assert not llm.service.engine.executor.drafter._has_failed  # type: ignore[attr-defined]
    assert len(seen) > 60
    for tokens, line in seen[::3]:
        assert line == draft(method, weights, target, tokens, len(line)) and line


@pytest.mark.parametrize("method", METHODS)
def test_trees_as_plain_pytorch(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first child made for each node is the likeliest token after its whole path, computed alone."""
    target, speculation = save_target(tmp_path, method)
    weights = make_weights(method)
    seen: list[tuple[list[int], list[Draft]]] = []
    finish = BranchMaker.finish

    def note(self: BranchMaker, lines: Sequence[Line], min_chance: float) -> None:
        seen.extend((line.device.state.tokens[: line.length], list(line.drafts)) for line in lines)
        finish(self, lines, min_chance)

    monkeypatch.setattr(BranchMaker, "finish", note)
    with open_llm(tmp_path, {**speculation, "tree": True}, max_num_batched_tokens=40) as llm:
        scheduler: Any = llm.service.engine.scheduler
        scheduler._speculation = AlwaysAhead()
        asked = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
        llm.generate(make_prompts(), asked, use_tqdm=False)
        assert not llm.service.engine.executor.drafter._has_failed  # type: ignore[attr-defined]
        assert llm.stats()["num_draft_tokens"] > 60
    assert sum(not is_line(tree) for _, tree in seen) > 20
    for tokens, tree in seen[::5]:
        for i, path in enumerate(find_paths(tree)):
            if not any(one.parent == tree[i].parent for one in tree[:i]):  # the first child
                before = [tree[node].token for node in path[:-1]]
                expected = draft(method, weights, target, tokens, len(path), before)
                assert tree[i].token == expected[len(path) - 1]


@pytest.mark.parametrize("tree", [False, True], ids=["line", "tree"])
@pytest.mark.parametrize("method", METHODS)
def test_answers_are_the_same(tmp_path: Path, method: str, tree: bool) -> None:
    _, speculation = save_target(tmp_path, method)
    speculation = {**speculation, "tree": tree}
    asked = [
        SamplingParams(max_tokens=20, temperature=t, seed=i, ignore_eos=True, detokenize=False, logprobs=1, n=1 + i % 2)
        for i, t in enumerate((0.0, 1.0, 0.7, 0.0))
    ]
    found = []
    for config in ({"method": "ngram"}, speculation):
        with open_llm(tmp_path, config, kv_cache_tokens=320, max_model_len=112) as llm:
            scheduler: Any = llm.service.engine.scheduler
            scheduler._speculation = AlwaysAhead()
            found.append([
                [(one.token_ids, str(one.logprobs)) for one in output.outputs]
                for _ in range(2)
                for output in llm.generate(make_prompts(2), asked, use_tqdm=False)
            ])  # fmt: skip
    assert found[0] == found[1]


def test_what_is_refused(tmp_path: Path) -> None:
    _, speculation = save_target(tmp_path, "eagle")
    heads = tmp_path / "heads"
    with pytest.raises(InvalidModel, match=r"tensor 'layers.0.*has no place|is unknown"):
        open_llm(tmp_path, {**speculation, "method": "medusa"})
    with pytest.raises(InvalidConfig, match="has no MTP layer"):
        open_llm(tmp_path, {"method": "mtp"})
    (heads / "config.json").write_text(json.dumps({**LIKE, "hidden_size": 32}))
    with pytest.raises(InvalidConfig, match="hidden states of 32 values, the model has 64"):
        open_llm(tmp_path, speculation)
    (heads / "model.safetensors").rename(heads / "pytorch_model.bin")
    with pytest.raises(InvalidModel, match="is a pickle, which can run any code"):
        open_llm(tmp_path, speculation)


def test_a_vocabulary_that_differs_is_refused(tmp_path: Path) -> None:
    oracle.save(oracle.make("LlamaForCausalLM", LIKE), tmp_path / "target")
    oracle.save(oracle.make("LlamaForCausalLM", {**LIKE, "vocab_size": 300}), tmp_path / "draft")
    with pytest.raises(InvalidConfig, match="a vocabulary of 300 tokens, the model one of 320"):
        open_llm(tmp_path, {"model": str(tmp_path / "draft")})


def test_a_draft_model_that_does_not_fit_says_by_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle.save(oracle.make("LlamaForCausalLM", LIKE), tmp_path / "target")
    monkeypatch.setattr("penstock.api.drafting.free_memory_bytes", lambda: 1 << 10)
    with pytest.raises(InvalidConfig, match=r"0.00 GiB are free: 0.0\d GiB too little"):
        open_llm(tmp_path, {"model": str(tmp_path / "target")})


def write_tokenizer(folder: Path, ids: dict[str, int]) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": ids, "merges": []}}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_vocabulary_with_the_same_tokens(tmp_path: Path, temperature: float) -> None:
    """The same model under other ids, and with more tokens: its drafts are all accepted once the ids are mapped."""
    target = oracle.make("LlamaForCausalLM", LIKE)
    oracle.save(target, tmp_path / "target")
    other, order = oracle.make("LlamaForCausalLM", {**LIKE, "vocab_size": 380}), torch.randperm(VOCAB)
    weights = {**target.state_dict()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.full((380, WIDTH), 0.5)
        rows[order + 40] = weights[name]
        weights[name] = rows
    other.load_state_dict(weights)
    oracle.save(other, tmp_path / "draft")
    write_tokenizer(tmp_path / "target", {f"t{i}": i for i in range(VOCAB)})
    write_tokenizer(tmp_path / "draft", {f"t{i}": int(order[i]) + 40 for i in range(VOCAB)} | {"other": 3})
    speculation = {"model": str(tmp_path / "draft"), "use_heterogeneous_vocab": True}
    with open_llm(tmp_path, speculation) as llm:
        scheduler: Any = llm.service.engine.scheduler
        scheduler._speculation = AlwaysAhead()
        asked = SamplingParams(max_tokens=20, temperature=temperature, seed=1, ignore_eos=True, detokenize=False)
        llm.generate(make_prompts(), asked, use_tqdm=False)
        assert llm.stats()["num_accepted_tokens"] == llm.stats()["num_draft_tokens"] > 50
    write_tokenizer(tmp_path / "draft", {f"other{i}": i for i in range(VOCAB)})
    with pytest.raises(InvalidConfig, match="have only 0 in common, under 50%"):
        open_llm(tmp_path, speculation)


def test_rejection_sampling(tmp_path: Path) -> None:
    """A draft model equal to the target is never rejected; another one's answers are others, and repeat with a seed."""
    oracle.save(oracle.make("LlamaForCausalLM", LIKE), tmp_path / "target")
    oracle.save(oracle.make("LlamaForCausalLM", LIKE, seed=1), tmp_path / "other")
    asked = SamplingParams(max_tokens=30, temperature=1.0, seed=4, ignore_eos=True, detokenize=False)
    shares = []
    for name in ("target", "other"):
        speculation = {"model": str(tmp_path / name), "verification": "rejection"}
        with open_llm(tmp_path, speculation, enable_prefix_caching=False) as llm:
            scheduler: Any = llm.service.engine.scheduler
            scheduler._speculation = AlwaysAhead()
            found = [
                [output.outputs[0].token_ids for output in llm.generate(make_prompts(), asked, use_tqdm=False)]
                for _ in range(2)
            ]
            told = llm.generate(make_prompts()[:1], asked, use_tqdm=False)[0].applied
            assert [one.exact for one in told if one.kind == "verification"] == [False]
            stats = llm.stats()
            shares.append(stats["num_accepted_tokens"] / stats["num_draft_tokens"])
        assert found[0] == found[1]
    assert shares[0] == 1.0 and 0 < shares[1] < 0.9
    with pytest.raises(InvalidConfig, match="verification=rejection gives other tokens than the model alone"):
        open_llm(tmp_path, speculation, deterministic=True)


@pytest.mark.parametrize(
    "content",
    [
        {"model": {"vocab": [[["a"], 0.1]]}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": ["b"], "id": 1}]},
        {"model": {"vocab": {"a": "0"}}},
        {"model": [], "added_tokens": 5},
    ],
)
def test_a_damaged_vocabulary_is_refused(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InvalidModel, match="lists no tokens with their ids"):
        read_vocabulary(tmp_path)
