"""Checkpoints that store experts one by one or stacked [E, O, C], merged or in parts, give the same parameters."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch

from penstock.errors import InvalidModel
from penstock.models.layer import Merge
from penstock.models.load import match
from penstock.models.names import LLAMA, Names, Stored, take_number
from penstock.models.reading import Source, from_checkpoint, read_blocks
from penstock.ops import FORMATS
from penstock.quant.gguf import GGML_TYPES
from penstock.quant.packed import GgmlMatrix
from tests.models.stored import Stored as Checkpoint

E, H, C = 3, 4, 5
NAMES = Names(
    prefixes=("model.",),
    stack="layers",
    layer={
        "moe.gate": "mlp.router",
        "moe.experts.*.w1": "mlp.experts.*.gate",
        "moe.experts.*.w3": "mlp.experts.*.up",
        "moe.experts.*.w2": "mlp.experts.*.down",
        "moe.experts.gate_up_proj": Stored("mlp.experts.*.gate_up", "stacked"),
        "moe.experts.down_proj": Stored("mlp.experts.*.down", "stacked"),
        "moe.gate_exps": Stored("mlp.experts.*.gate", "stacked"),
        "moe.up_exps": Stored("mlp.experts.*.up", "stacked"),
    },
)
GATES, UPS, DOWNS = torch.randn(E, H, C), torch.randn(E, H, C), torch.randn(E, C, H)
APART = {
    f"model.layers.0.moe.experts.{e}.{name}.weight": stack[e]
    for e in range(E)
    for name, stack in (("w1", GATES), ("w3", UPS), ("w2", DOWNS))
}
STACKED = {"layers.0.moe.experts.gate_up_proj": torch.cat((GATES, UPS), 1), "layers.0.moe.experts.down_proj": DOWNS}
PARTS = {
    "layers.0.moe.gate_exps.weight": GATES,
    "layers.0.moe.up_exps.weight": UPS,
    "layers.0.moe.experts.down_proj": DOWNS,
}


def described(one_matrix: bool = False) -> Any:
    """Each expert has matrices of its own, or all gates and ups are one matrix."""
    shapes = {f"layers.0.mlp.experts.{e}.down.weight": (C, H) for e in range(E)}
    halves = (("gate", H), ("up", H))
    if one_matrix:
        shapes["layers.0.mlp.gate_up.weight"] = (E * 2 * H, C)
        merge = Merge(tuple((f"experts.{e}.{part}", rows) for e in range(E) for part, rows in halves))
        merges = {"layers.0.mlp.gate_up": merge}
    else:
        shapes |= {f"layers.0.mlp.experts.{e}.gate_up.weight": (2 * H, C) for e in range(E)}
        merges = {f"layers.0.mlp.experts.{e}.gate_up": Merge(halves) for e in range(E)}
    return SimpleNamespace(
        parameters=lambda: shapes, merges=lambda: merges, names=NAMES, head=None, architecture="Moe", num_layers=1
    )


def load(tensors: dict[str, torch.Tensor], spec: Any) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint({}, tensors)
    take = from_checkpoint(checkpoint, match(checkpoint, spec), None)
    return {name: take(name) for name in spec.parameters()}


@pytest.mark.parametrize("tensors", [APART, STACKED, PARTS], ids=["apart", "stacked", "stacked parts"])
def test_experts_are_the_same_however_they_are_stored(tensors: dict[str, torch.Tensor]) -> None:
    found = load(tensors, described())
    for e in range(E):
        assert torch.equal(found[f"layers.0.mlp.experts.{e}.gate_up.weight"], torch.cat((GATES[e], UPS[e])))
        assert torch.equal(found[f"layers.0.mlp.experts.{e}.down.weight"], DOWNS[e])


@pytest.mark.parametrize("tensors", [APART, PARTS], ids=["apart", "stacked parts"])
def test_stacks_are_parts_of_one_parameter(tensors: dict[str, torch.Tensor]) -> None:
    whole = load(tensors, described(one_matrix=True))["layers.0.mlp.gate_up.weight"]
    assert torch.equal(whole, torch.cat((GATES, UPS), 1).flatten(0, 1))


class Counting(Checkpoint):
    """Reads copies, as a GGUF file does, and notes how many of them are alive."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__({}, tensors)
        self.calls, self.copies, self.most = Counter[str](), WeakSet[torch.Tensor](), 0

    def tensor(self, name: str) -> torch.Tensor:
        self.calls[name] += 1
        copy = self.tensors[name].clone()
        self.copies.add(copy)
        self.most = max(self.most, len(self.copies))
        return copy


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_stack_is_read_once_for_all_its_experts(dtype: torch.dtype | None) -> None:
    checkpoint, spec = Counting(PARTS), described(one_matrix=True)
    take = from_checkpoint(checkpoint, match(checkpoint, spec), dtype)
    found = take("layers.0.mlp.gate_up.weight")
    assert torch.equal(found, torch.cat((GATES, UPS), 1).flatten(0, 1).to(dtype or torch.float32))
    assert sorted(checkpoint.calls.values()) == [1, 1] and checkpoint.most == 1 and not checkpoint.copies


def test_an_experts_blocks_are_looked_at_alone() -> None:
    """A scan of the whole stack for each expert takes time with the square of their number."""
    mxfp4 = next(number for number, kind in GGML_TYPES.items() if kind.name == "MXFP4")
    raw = np.full((E * H, 17), 120, dtype=np.uint8)
    raw[2 * H, 0] = 255  # an exponent no packed format holds

    def read(expert: int, order: np.ndarray | None = None) -> Any:
        checkpoint: Any = SimpleNamespace(read_ggml=lambda name: GgmlMatrix(mxfp4, raw, 32, order))
        return read_blocks(checkpoint, Source("exps", "stacked", (H, 32), rows=range(expert * H, (expert + 1) * H)))

    assert read(2) is None
    assert read(1).format is FORMATS["MXFP4"] and read(1).num_out == H
    assert read(1).raw.ctypes.data == raw[H].ctypes.data and len(read(1).raw) == H
    raw[2 * H, 0] = 120
    assert read(1, np.arange(E * H)[::-1]).order.tolist() == [7, 6, 5, 4]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers.0.moe.experts.down_proj": DOWNS[:2]}, r"shape \[2, 5, 4\], but its config says \[3, 5, 4\]"),
        ({"layers.0.moe.experts.down_proj": torch.zeros(4, C, H)}, "config and weights do not belong together"),
        ({"layers.0.moe.experts.down_proj": torch.zeros(E, H, C)}, r"config says \[3, 5, 4\]"),
        ({"layers.0.moe.experts.down_proj": torch.zeros(())}, r"config says \[1, 5, 4\]"),
        ({"layers.0.moe.experts.0.w2.weight": DOWNS[0]}, "config and weights do not belong together"),
        ({"layers.0.moe.experts.*.w2.weight": DOWNS[0]}, "is unknown to Moe"),
        ({"layers.0.moe.experts.0.1.w2.weight": DOWNS[0]}, "is unknown to Moe"),
    ],
)
def test_damaged_stacks_are_named(change: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(InvalidModel, match=said):
        load({**STACKED, **change}, described())


def test_a_missing_expert_is_named_as_the_checkpoint_would() -> None:
    tensors = {name: tensor for name, tensor in APART.items() if ".experts.1.w3" not in name}
    with pytest.raises(InvalidModel, match=r"'layers\.0\.moe\.experts\.1\.w3\.weight' of shape \[4, 5\] is missing"):
        load(tensors, described())


def test_spelling_and_finding_are_inverse() -> None:
    for parameter in ("mlp.experts.7.gate.weight", "mlp.experts.0.up.weight", "mlp.router.weight"):
        ours = f"layers.12.{parameter}"
        assert NAMES.find(NAMES.spelling(ours)) == Stored(ours)
    assert NAMES.spelling("layers.1.mlp.experts.3.gate.weight") == "layers.1.moe.experts.3.w1.weight"
    assert NAMES.find("model.layers.2.moe.experts.05.w1.weight") == Stored("layers.2.mlp.experts.5.gate.weight")
    assert NAMES.find("layers.2.moe.experts.gate_up_proj") == Stored("layers.2.mlp.experts.*.gate_up.weight", "stacked")
    assert LLAMA.find("model.layers.2.mlp.experts.5.gate_proj.weight") is None
    assert take_number("experts.7.gate") == ("experts.*.gate", 7)
    assert take_number("experts.gate") is take_number("a.1.b.2.c") is None
