"""Every rule against the plain stages it replaces: the same bits on a CPU, and another list of ops."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from penstock import layers
from penstock.passes.lower import RULES, Rule, row_limits, rules
from penstock.passes.lower.fused import FusedExperts, QkvWrite
from penstock.passes.lower.products import FusedProduct
from penstock.passes.lower.stages import Flow, Stage
from penstock.quant.dense import Matrix
from tests.passes.models import answer, describe, make, only, trace, without

CASES = [
    pytest.param(architecture, variant, options, id=f"{architecture}-{variant}-{options.get('quantization')}")
    for architecture, variant in [
        ("LlamaForCausalLM", 0),
        ("Qwen3ForCausalLM", 1),
        ("Gemma2ForCausalLM", 0),
        ("GPT2LMHeadModel", 0),
        ("FalconForCausalLM", 0),
        ("OPTForCausalLM", 1),
        ("GraniteForCausalLM", 0),
        ("Olmo2ForCausalLM", 0),
        ("Qwen2MoeForCausalLM", 0),
    ]
    for options in ({}, {"quantization": "int8"}, {"quantization": "int4", "rounded": False})
]
ON_CPU = [rule for rule in RULES if "cpu" in rule.devices]
# a case whose list of ops each rule changes
WHERE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "write_qkv": ("Qwen3ForCausalLM", 0, {}),
    "norm_in_product": ("LlamaForCausalLM", 0, {"quantization": "int8"}),
    "gate_in_product": ("LlamaForCausalLM", 0, {}),
    "activate_in_product": ("GPT2LMHeadModel", 0, {}),
    "add_in_product": ("LlamaForCausalLM", 0, {}),
    "gate_in_experts": ("Qwen2MoeForCausalLM", 0, {}),
    "add_in_experts": ("MixtralForCausalLM", 0, {}),
    "add_in_norm": ("Gemma2ForCausalLM", 0, {}),
    "attend_ends": ("LlamaForCausalLM", 0, {}),
}


def test_every_rule_has_a_case() -> None:
    elsewhere = {"mix_ends"}  # tests/passes/test_strangers.py
    assert {rule.name for rule in ON_CPU} == set(WHERE) | elsewhere


@pytest.mark.parametrize(("architecture", "variant", "options"), CASES)
def test_the_same_bits(
    architecture: str, variant: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = describe(architecture, variant)
    plain = answer(make(config, [], monkeypatch, **options))
    assert plain.std() > 0.05
    assert torch.equal(answer(make(config, RULES, monkeypatch, **options)), plain)
    for rule in ON_CPU:
        assert torch.equal(answer(make(config, [rule], monkeypatch, **options)), plain), rule.name


@pytest.mark.parametrize("name", WHERE)
def test_taking_a_rule_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits by other ops."""
    architecture, variant, options = WHERE[name]
    config, found = describe(architecture, variant), []
    for chosen in (RULES, without(name)):
        with trace() as called:
            found.append((answer(make(config, chosen, monkeypatch, **options)), called))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] != found[1][1]


def test_a_plain_step_is_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(describe("Qwen3ForCausalLM", 0), [], monkeypatch)
    with trace() as called:
        answer(model, [[5, 6, 7]], 1)
    attention = ["linear", "rms_norm", "rms_norm", "rope", "rope", "cache_write", "attention", "linear"]
    ffn = ["linear", "gated_activation", "linear"]
    block = ["rms_norm", *attention, "add", "rms_norm", *ffn, "add"]
    step = ["embedding", *block * len(model.blocks), "rms_norm", "gather", "linear"]
    assert called[: len(step)] == step
    assert all(isinstance(block, layers.Block) for block in model.blocks)


def test_a_lowered_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(describe("Qwen3ForCausalLM", 0), RULES, monkeypatch, quantization="int8")
    with trace() as called:
        answer(model, [[5, 6, 7]], 1)
    block = ["packed_linear", "qkv_write", "attention", "packed_linear", "packed_linear", "packed_linear"]
    step = ["packed_rows", *block * len(model.blocks), "rms_norm", "gather", "packed_linear"]
    assert called[: len(step)] == step


@dataclass(frozen=True)
class Wrong:
    """A stage with a mistake."""

    stage: Stage
    mistake: Any

    def __call__(self, flow: Flow) -> None:
        self.mistake(self.stage, flow)


def _forget_to_add(stage: FusedProduct, flow: Flow) -> None:
    flow.x = stage.run(flow.y if stage.branch is None else flow.x, None)


def _add_twice(stage: Stage, flow: Flow) -> None:
    before = flow.x
    stage(flow)
    flow.x = flow.x + 1e-6 * before


def _gate_by_another(stage: FusedExperts, flow: Flow) -> None:
    experts = copy.copy(stage.experts)
    experts.activation = "gelu"
    replace(stage, experts=experts)(flow)


def _select_the_wrong_tokens(stage: Stage, flow: Flow) -> None:
    ends = flow.step.ends
    if ends is not None and len(ends.at):
        flow.step = replace(flow.step, ends=layers.Ends(ends.at.flip(0), ends.step))  # type: ignore[type-var]
    stage(flow)


MISTAKES: dict[str, Any] = {
    "write_qkv": lambda stage: replace(stage, norms=replace(stage.norms, eps=stage.norms.eps + 1e-3)),
    "norm_in_product": lambda stage: replace(stage, branch=replace(stage.branch, norm=_other_eps(stage.branch.norm))),
    "gate_in_product": lambda stage: replace(stage, activation="gelu"),
    "activate_in_product": lambda stage: replace(stage, activation="gelu"),
    "add_in_product": lambda stage: Wrong(stage, _forget_to_add),
    "gate_in_experts": lambda stage: Wrong(stage, _gate_by_another),
    "add_in_experts": lambda stage: Wrong(stage, _add_twice),
    "add_in_norm": lambda stage: Wrong(stage, _add_twice),
    "attend_ends": lambda stage: Wrong(stage, _select_the_wrong_tokens),
}


def _other_eps(norm: Any) -> layers.RmsNorm:
    return layers.RmsNorm(norm.ops, norm.weight, norm.eps + 1e-3)


@pytest.mark.parametrize("name", WHERE)
def test_a_bug_in_a_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails with a wrong result or, for tokens selected wrongly, in `Paged` itself."""
    architecture, variant, options = WHERE[name]
    config, right = describe(architecture, variant), only(name)[0]

    def make_wrong(*stages: Stage) -> Any:
        made = right.make(*stages)
        return made and [MISTAKES[name](stage) for stage in made]

    wrong: Rule = replace(right, make=make_wrong)
    plain = answer(make(config, [], monkeypatch, **options))
    try:
        found = answer(make(config, [wrong], monkeypatch, **options))
    except AssertionError:
        return
    assert not torch.equal(found, plain)


def test_row_limits_come_from_the_lowered_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernels change at these numbers of rows; a plain model has none to tell."""
    config = describe("LlamaForCausalLM")
    assert row_limits(make(config, [], monkeypatch)) == []
    monkeypatch.setattr("penstock.models.load.dense", Matrix)
    assert set(row_limits(make(config, RULES, monkeypatch, "cuda"))) == {15, 16, 32, 48}
    assert row_limits(make(config, RULES, monkeypatch, "cuda", exact=True)) == [16, 32, 64]


def test_rules_are_small() -> None:
    import ast
    from pathlib import Path

    tree = ast.parse(Path(rules.__file__).read_text())
    sizes = {node.name: (node.end_lineno or 0) - node.lineno for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {rule.name for rule in RULES} <= set(sizes)
    assert all(size <= 25 for size in sizes.values())
    assert QkvWrite.__doc__
