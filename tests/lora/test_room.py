"""The room of adapters on a GPU: counted as it is taken, and changed by two copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.engine.executor import Answer, Done, LoadLora
from penstock.engine.loras import LoraSlots
from penstock.errors import InvalidRequest
from penstock.models.spec import FAMILIES, spec_from_config
from penstock.ops import LoraStacks, LowRank
from penstock.ops.matmul.lora_stacks import LoraArea
from penstock.passes.load import load_lowered
from penstock.passes.lora_table import StackTable
from penstock.runner.cuda.gpu import lora_bytes
from penstock.types import LoraUse

META = torch.device("meta")


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_room_is_counted_as_it_is_taken(architecture: str) -> None:
    spec = spec_from_config({"architectures": [architecture], **FAMILIES[architecture].like[0]}, 64)
    if spec.is_encoder:
        return
    table = StackTable(spec, 3, 20, torch.bfloat16, META)
    load_lowered(None, spec, dtype=torch.bfloat16, dummy_seed=0, device=META, loras=table)
    assert table.area.num_bytes == 3 * 32 * lora_bytes(spec)
    has_shared = any(getattr(layer.ffn, "shared", None) for layer in spec.layers)
    assert has_shared == any(".shared." in name for name in table)


def test_a_slot_changes_by_two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many linears there are, and also for a sum."""
    stacks = {str(i): LoraStacks(16, (24, 40), (8, 16)) for i in range(5)}
    area = LoraArea(stacks, 2, torch.float32, torch.device("cpu"))
    part = LowRank.pack(torch.ones(4, 40), torch.ones(24, 4))
    one = area.lay_out(dict.fromkeys(stacks, [part]), 4)
    copied: list[int] = []
    copy = torch.Tensor.copy_

    def note(self: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        if self.untyped_storage().data_ptr() in (
            area.values.untyped_storage().data_ptr(),
            area.scales.untyped_storage().data_ptr(),
        ):
            copied.append(self.numel())
        return copy(self, *given, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", note)
    for terms in ([(one, 1.0)], [(one, 0.5)], [(one, 2.0), (one, -1.0)]):
        copied.clear()
        area.fill(1, terms)
        assert copied == [area.values.shape[1], area.scales.shape[1]]
    assert not area.values[0].any() and stacks["4"].scales[1].tolist() == 2 * ([2.0] * 4 + [-1.0] * 4 + [0.0] * 8)


def slots(ranks: dict[int, int]) -> LoraSlots:
    made = LoraSlots(4, 4)
    made.memory.sum_rank = 32
    made.connect(lambda message: Done(Answer({"rank": ranks[message.number], "fingerprint": "f"})))  # type: ignore[attr-defined]
    return made


def test_sums_have_room_for_their_ranks() -> None:
    made = slots({1: 16, 2: 16, 3: 8})
    for number in (1, 2, 3):
        made.load(LoadLora(number, "path")).result()
    made.poll()
    one, two, three = (LoraUse(str(number), number, 1.0) for number in (1, 2, 3))
    made.check_known([one, two])
    made.check_known([three])
    with pytest.raises(
        InvalidRequest, match=r"ranks of 3 adapters .* add up to 40, over the 32 .* --max-lora-rank to 40"
    ):
        made.check_known([one, two, three])
    made.memory.sum_rank = None  # a CPU
    made.check_known([one, two, three])


def test_a_new_engine_knows_the_ranks() -> None:
    """Adapters that it is told of, and has not read."""
    made = slots({})
    for number in (1, 2):
        made.load(LoadLora(number, "path", "f", 24)).result()
    with pytest.raises(InvalidRequest, match="add up to 48"):
        made.check_known([LoraUse("a", 1, 1.0), LoraUse("b", 2, 1.0)])
