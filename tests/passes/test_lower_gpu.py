"""Every GPU rule against the plain stages it replaces, within the ops' tolerance, through Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton")

import penstock.ops.triton.bodies  # noqa: E402, F401  registers the bodies
from penstock import ops  # noqa: E402
from penstock.models import decoder, load  # noqa: E402
from penstock.models.decoder import Decoder  # noqa: E402
from penstock.models.memory import KvMemory  # noqa: E402
from penstock.ops.triton.attention.attention import tile_tokens  # noqa: E402
from penstock.passes.lower import RULES, Rule, products  # noqa: E402
from penstock.quant.dense import Matrix  # noqa: E402
from penstock.runner.step import Step  # noqa: E402
from tests.models.paged import Paged, Row  # noqa: E402
from tests.passes.models import describe, make, only, trace, without  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real one")
PROMPTS = [[5, 6, 7, 8, 9], [20]]
SMALL = {"num_hidden_layers": 1, "vocab_size": 96}
NEEDS = {"defer_norm": ("fold_norm", "norm_in_product", "write_qkv"), "join_attention": ("write_qkv",)}
NEEDS["join_fp8_mlp"] = ("gate_in_product",)
WHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "fold_norm": ("LlamaForCausalLM", {}),
    "write_qkv": ("Qwen3ForCausalLM", {}),
    "norm_in_product": ("LlamaForCausalLM", {}),
    "gate_in_product": ("LlamaForCausalLM", {}),
    "activate_in_product": ("GPT2LMHeadModel", {}),
    "add_in_product": ("LlamaForCausalLM", {}),
    "add_in_norm": ("Gemma2ForCausalLM", {}),
    "join_fp8_mlp": ("LlamaForCausalLM", {"quantization": "fp8"}),
    "gate_in_experts": ("MixtralForCausalLM", {}),
    "add_in_experts": ("MixtralForCausalLM", {}),
    "attend_ends": ("LlamaForCausalLM", {}),
    "defer_norm": ("LlamaForCausalLM", {}),
    "join_attention": ("Qwen3ForCausalLM", {}),
}


class OnGpu(Paged):
    """Work dealt out as a GPU's runner does."""

    checks_ends = False  # compared by `ends` below

    def __init__(self, model: Decoder) -> None:
        super().__init__(model, num_blocks=16)
        kept = [memory for memory in model.spec.memories() if isinstance(memory, KvMemory)]
        self._tile = min(tile_tokens(memory.num_heads, memory.num_kv_heads) for memory in kept)
        for cache in self.caches:
            cache.k = cache.k.transpose(2, 3).contiguous().transpose(2, 3)

    def _step(self, work: list[tuple[Row, int]]) -> Step:  # type: ignore[override]
        step = super()._step(work)
        counts = [count for _, count in work]
        tiles = [(s, first) for s, count in enumerate(counts) for first in range(0, count, self._tile)]
        single = all(count == 1 for count in counts)
        dealt = None if single else torch.tensor(tiles, dtype=torch.int32)
        step.work = ops.Work(len(counts) if single else 0, dealt, 2 if single else 1)
        return step


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are stored as on a GPU; in float32, what it does with 16 bits alone."""
    for module in (decoder, load):
        monkeypatch.setattr(module, "dense", Matrix)
    monkeypatch.setattr(products, "FOLDED_BYTES", 4)
    monkeypatch.setattr(
        products, "can_defer_norm", lambda x, norm, bias, eps: eps > 0 and norm is None and bias is None and len(x) > 1
    )


def answer(model: Decoder) -> torch.Tensor:
    rows = OnGpu(model).run(PROMPTS, 2, chunk=64)
    return torch.stack([logits for row in rows for logits in row.logits])


_answers: dict[Any, tuple[torch.Tensor, list[str]]] = {}  # of a family without rules and with all of them


def remember(
    name: str, rules: Sequence[Rule], monkeypatch: pytest.MonkeyPatch, deep: bool
) -> tuple[torch.Tensor, list[str]]:
    """The answer of the family of rule `name` and the ops that it calls, computed once for all rules of that family."""
    architecture, options = WHERE[name]
    key = architecture, tuple(options.items()), tuple(rule.name for rule in rules)
    if key not in _answers:
        with trace(deep) as calls:
            found = answer(make(describe(architecture, **SMALL), rules, monkeypatch, "cuda", **options))
        _answers[key] = found, calls
    return _answers[key]


def near(found: torch.Tensor, expected: torch.Tensor, fp8: bool) -> bool:
    bound = 0.1 if fp8 else 2e-4
    return bool((found - expected).abs().max() <= bound * expected.abs().max())


def test_every_gpu_rule_has_a_case() -> None:
    assert {rule.name for rule in RULES if "cuda" in rule.devices} == {*WHERE, "mix_ends"}


@pytest.mark.parametrize("name", WHERE)
def test_a_rule_and_its_absence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone (with those it builds on) and missing from all: near the plain model, by other ops."""
    architecture, options = WHERE[name]
    config, fp8 = describe(architecture, **SMALL), "quantization" in options
    base = only("fold_norm") if fp8 else []  # other weights are rounded where norms are folded in
    plain, _ = remember(name, base, monkeypatch, False)
    assert plain.std() > 0.02
    chosen = [rule for rule in RULES if rule in base or rule.name in (name, *NEEDS.get(name, ()))]
    with trace() as alone:
        assert near(answer(make(config, chosen, monkeypatch, "cuda", **options)), plain, fp8)
    with trace(True) as missing:
        assert near(answer(make(config, without(name), monkeypatch, "cuda", **options)), plain, fp8)
    found, whole = remember(name, RULES, monkeypatch, True)
    assert near(found, plain, fp8)
    if name not in ("attend_ends", "fold_norm"):  # no ends here; the same ops with other weights
        assert alone and missing != whole


def _wrong_eps(stage: Any) -> Any:
    return replace(stage, branch=replace(stage.branch, norm=type(stage.branch.norm)(
        stage.branch.norm.ops, stage.branch.norm.weight, stage.branch.norm.eps + 0.5)))  # fmt: skip


def test_a_bug_in_folding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm's weight is multiplied in, and applied once more."""
    config = describe("LlamaForCausalLM", **SMALL)
    plain = answer(make(config, [], monkeypatch, "cuda"))
    right = only("fold_norm")[0]

    def make_wrong(branch: Any, product: Any) -> Any:
        made = right.make(branch, product)
        return made and [branch, product]

    assert not near(answer(make(config, [replace(right, make=make_wrong)], monkeypatch, "cuda")), plain, False)


@pytest.mark.parametrize("name", ["defer_norm", "join_attention", "join_fp8_mlp"])
def test_a_bug_in_a_joined_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, options = WHERE[name]
    config = describe(architecture, **SMALL)
    plain = answer(make(config, [], monkeypatch, "cuda", **options))
    right = only(name)[0]

    def make_wrong(*stages: Any) -> Any:
        made = right.make(*stages)
        if made is None:
            return None
        stage: Any = made[0]
        if name == "defer_norm":
            return [replace(stage, product=_wrong_eps(stage.product))]
        if name == "join_attention":
            return [replace(stage, write=replace(stage.write, norms=replace(stage.write.norms, k=None)))]
        return [replace(stage, first=replace(stage.first, activation="relu"))]

    wrong = [replace(rule, make=make_wrong) if rule.name == name else rule for rule in RULES]
    found = answer(make(config, wrong, monkeypatch, "cuda", **options))
    assert not near(found, plain, "quantization" in options)
