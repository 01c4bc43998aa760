"""A scheme and a mixer that the package has never seen run without a change to it; so do passes that wrap linears."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from penstock import layers, ops
from penstock.models import decoder as builds
from penstock.models import load
from penstock.models.decoder import Build, Decoder, linears
from penstock.models.layer import Merges, Shapes, matrix
from penstock.models.spec import spec_from_config
from penstock.ops import OpTable
from penstock.passes.adapt import adapt
from penstock.passes.lower import RULES, Lower, LoweredBlock
from penstock.passes.lower.stages import Mix
from penstock.passes.observe import observe
from penstock.runner.step import Step, ends_of
from tests.passes.models import answer, describe, make, only, without


class Negated:
    """Stores the negative of a weight."""

    def __init__(self, ops: OpTable, weight: Tensor, bias: Tensor | None = None) -> None:
        self.num_out, self.num_in = weight.shape
        self.weight, self.bias = -weight.float(), bias

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        rows = [-(self.weight @ row) for row in x]
        y = torch.stack(rows) if rows else x.new_zeros(0, self.num_out)
        return y if self.bias is None else y + self.bias

    def rows(self, ids: Tensor) -> Tensor:
        return -self.weight[ids]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_an_unknown_scheme(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = describe(architecture)
    known = answer(make(config, RULES, monkeypatch))
    for module in (builds, load):
        monkeypatch.setattr(module, "dense", Negated)
    model = make(config, RULES, monkeypatch)
    assert {type(linear.scheme) for _, linear, _ in linears(model)} == {Negated}
    torch.testing.assert_close(answer(model), known, rtol=1e-3, atol=1e-3)


class RunningMean:
    """out(mean of in(x) over the step's own tokens so far): a mixer without a memory."""

    def __init__(self, ops: OpTable, into: layers.Linear, out: layers.Linear) -> None:
        self.ops, self.into, self.out = ops, into, out

    def __call__(self, x: Tensor, step: layers.StepInputs, memory: Any) -> Tensor:
        y, starts = self.into(x, step), step.query_start.tolist()
        means = torch.empty_like(y)
        for first, last in zip(starts, starts[1:]):
            for at in range(first, last):
                means[at] = y[first : at + 1].mean(0)
        return self.out(means, step)

    def linears(self) -> Iterator[tuple[str, layers.Linear]]:
        yield from (("into", self.into), ("out", self.out))


@dataclass(frozen=True)
class RunningMeanSpec:
    prefix: ClassVar[str] = "mean"
    width: int

    def parameters(self) -> Shapes:
        return matrix("into", self.width, self.width) | matrix("out", self.width, self.width)

    def merges(self) -> Merges:
        return {}

    def memory(self, max_model_len: int) -> None:
        return None

    def scratch_values(self) -> int:
        return self.width

    def build(self, build: Build, name: str) -> RunningMean:
        return RunningMean(build.ops, build.linear(f"{name}.into"), build.linear(f"{name}.out"))


def test_an_unknown_mixer() -> None:
    """Also in the last block, where only the tokens go on that logits are wanted of."""
    spec = spec_from_config(describe("LlamaForCausalLM"))
    spec = replace(spec, layers=tuple(replace(layer, mixer=RunningMeanSpec(spec.width)) for layer in spec.layers))  # type: ignore[type-var]
    tokens = torch.tensor([5, 6, 7, 8, 9])
    starts, lengths = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)
    found = []
    for rules in ([], without("mix_ends"), RULES, only("mix_ends")):
        ops = OpTable("cpu")
        model = load.load_model(None, spec, dummy_seed=0, finish=Lower(ops, rules=rules))
        assert isinstance(model, Decoder)
        if rules is RULES:
            assert isinstance(model.blocks[0], LoweredBlock)
            assert any(isinstance(stage, Mix) for stage in model.blocks[0].stages)
        step = Step(tokens, torch.tensor([0, 1, 2, 0, 1]), [], [], starts, lengths)
        whole = model.logits(model.forward(step, [None] * spec.num_layers))
        at = torch.tensor([2, 4])
        step.ends = ends_of(step, at, torch.tensor([0, 1]))
        ends = model.logits(model.forward(step, [None] * spec.num_layers))
        assert torch.equal(ends, whole[at])
        found.append(whole)
    assert all(torch.equal(found[0], other) for other in found[1:]) and found[0].std() > 0


def test_selecting_wrongly_after_a_mixer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug planted in rule mix_ends: the first tokens are taken, whichever are wanted."""
    from penstock.passes.lower import fused

    usual = fused.select

    def wrong(ops: OpTable, flow: Any) -> None:
        ends = flow.step.ends
        if ends is not None and len(ends.at):
            flow.step = replace(flow.step, ends=layers.Ends(ends.at - 1, ends.step))
        usual(ops, flow)

    monkeypatch.setattr(fused, "select", wrong)
    with pytest.raises(AssertionError):
        test_an_unknown_mixer()


def test_observing_changes_nothing_and_notes_every_input(monkeypatch: pytest.MonkeyPatch) -> None:
    config = describe("LlamaForCausalLM")
    expected = answer(make(config, [], monkeypatch))
    model, sums = make(config, [], monkeypatch), dict[str, float]()
    widths = {name: linear.scheme.num_in for name, linear, _ in linears(model)}

    def note(name: str, x: Tensor) -> None:
        assert x.shape[1] == widths[name]
        sums[name] = sums.get(name, 0.0) + float(x.abs().sum())

    observe(model, note)
    assert torch.equal(answer(model), expected)
    assert set(sums) == set(widths) and all(total > 0 for total in sums.values())
    assert "layers.0.attention.qkv" in sums and "layers.1.mlp.down" in sums


def test_inputs_of_each_expert_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they are what the router sent: every token to as many experts as it chooses."""
    config = describe("MixtralForCausalLM")
    expected, model = answer(make(config, [], monkeypatch)), make(config, [], monkeypatch)
    rows: dict[str, int] = {}

    def note(name: str, x: Tensor) -> None:
        rows[name] = rows.get(name, 0) + len(x)

    observe(model, note)
    assert torch.equal(answer(model), expected)
    for index in range(len(model.blocks)):
        for name in ("gate_up", "down"):
            prefix = f"layers.{index}.mlp.experts.{name}."
            each = {key: count for key, count in rows.items() if key.startswith(prefix)}
            assert len(each) > 1 and sum(each.values()) == 2 * rows[f"layers.{index}.attention.qkv"]


def test_an_adapted_linear_runs_plain_beside_fused_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapted before lowering, as at load; a delta of zeros changes no bit, another one the answer."""
    config = describe("LlamaForCausalLM")
    expected = answer(make(config, RULES, monkeypatch))
    for size in (0.0, 0.5):
        model = make(config, [], monkeypatch)
        names: list[str] = []

        def deltas(name: str, linear: layers.Linear, size: float = size, names: list[str] = names) -> Any:
            if not name.endswith("attention.qkv"):
                return None
            names.append(name)
            return lambda x, y, step: ops.add(y, y.new_full(y.shape, size))

        adapt(model, deltas)
        lower = Lower(model.ops)
        model.blocks = [lower(block, block is model.blocks[-1]) for block in model.blocks]
        assert names == [f"layers.{index}.attention.qkv" for index in range(len(model.blocks))]
        assert torch.equal(answer(model), expected) == (size == 0.0)
