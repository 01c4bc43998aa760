"""PEFT folders: what each key of the config means, and what is refused, by name, before a tensor is read."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import InvalidModel
from penstock.models.lora import Adapter, read_adapter
from penstock.models.lora.locator import MAX_FACTOR
from penstock.models.spec import FAMILIES, ModelSpec, spec_from_config
from penstock.ops import LowRank
from penstock.ops.matmul.linear import unpack_panels
from penstock.passes.lora_table import LoraTable
from penstock.runner.loras import LoraBank, settle
from penstock.types import LoraUse
from penstock.types.lora import MAX_SCALE
from tests.lora import adapters
from tests.models import oracle

RANK, ALPHA = 4, 6.0
NUM_MUTANTS = 150


@pytest.fixture(scope="module")
def model() -> Any:
    return oracle.make("LlamaForCausalLM", FAMILIES["LlamaForCausalLM"].like[0])


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return spec_from_config({"architectures": ["LlamaForCausalLM"], **FAMILIES["LlamaForCausalLM"].like[0]})


@pytest.fixture(scope="module")
def pairs(model: Any) -> adapters.Pairs:
    return adapters.make_pairs(model, RANK, 3, ("q_proj", "v_proj", "down_proj"))


def write(folder: Path, model: Any, pairs: adapters.Pairs, **config: Any) -> Path:
    return adapters.write(folder, model, pairs, ALPHA, **config)


def scales(adapter: Adapter) -> dict[str, list[float]]:
    return {name: [part.scale for part in parts] for name, parts in adapter.parts.items()}


def test_parts_lie_where_the_model_has_them(model: Any, spec: ModelSpec, pairs: Any, tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path / "a", model, pairs), spec, 16)
    assert adapter.rank == RANK and len(adapter.parts) == 2 * spec.num_layers
    rows = dict(spec.merges()["layers.1.attention.qkv"].parts)
    q, v = adapter.parts["layers.1.attention.qkv"]
    assert (q.first, q.num_out, v.first, v.num_out) == (0, rows["q"], rows["q"] + rows["k"], rows["v"])
    a, b = pairs["model.layers.1.self_attn.v_proj"]
    assert unpack_panels(v.a, RANK).equal(a) and unpack_panels(v.b, rows["v"]).equal(b) and v.scale == ALPHA / RANK


def test_scales_and_ranks_by_module(model: Any, spec: ModelSpec, tmp_path: Path) -> None:
    pairs = adapters.make_pairs(model, 4, 1, ("q_proj",)) | adapters.make_pairs(model, 9, 2, ("down_proj",))
    patterns = {"rank_pattern": {"down_proj": 9}, "alpha_pattern": {r"layers\.1\.mlp\.down_proj": 3}}
    found = scales(read_adapter(write(tmp_path / "a", model, pairs, **patterns), spec, 16))
    assert found["layers.0.attention.qkv"] == [ALPHA / 4]
    assert found["layers.0.mlp.down"] == [ALPHA / 9] and found["layers.1.mlp.down"] == [3 / 9]
    found = scales(read_adapter(write(tmp_path / "b", model, pairs, use_rslora=True, **patterns), spec, 16))
    assert found["layers.0.attention.qkv"] == [ALPHA / 2] and found["layers.0.mlp.down"] == [ALPHA / 3]


def test_targets(model: Any, spec: ModelSpec, pairs: Any, tmp_path: Path) -> None:
    expression = r".*\.(q_proj|v_proj|down_proj)"
    longer = r"(?:model\.)?layers\.\d+\..*(?:attn|mlp).*\.(?:q_proj|v_proj|down_proj)|.*\.fc\d?"
    for number, targets in enumerate((expression, longer, "all-linear", ["q_proj", "v_proj", "mlp.down_proj"])):
        assert read_adapter(write(tmp_path / f"{number}", model, pairs, target_modules=targets), spec, 16).parts
    first = {name: pair for name, pair in pairs.items() if ".0." in name}
    chosen = write(tmp_path / "first", model, first, layers_to_transform=[0])
    assert set(read_adapter(chosen, spec, 16).parts) == {"layers.0.attention.qkv", "layers.0.mlp.down"}
    with pytest.raises(InvalidModel, match="layers.1.* are missing"):
        read_adapter(write(tmp_path / "missing", model, first), spec, 16)
    with pytest.raises(InvalidModel, match="target_modules does not name"):
        read_adapter(write(tmp_path / "other", model, pairs, target_modules=["k_proj"]), spec, 16)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "use_dora=True.*penstock merge MODEL"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"some_new_key": 5}, "some_new_key=5"),
        ({"r": 0}, "r=0"),
        ({"r": True}, "r=True"),
        ({"lora_alpha": "x"}, "lora_alpha='x'"),
        ({"lora_alpha": 10**400}, "lora_alpha=.*finite"),
        ({"lora_alpha": 1e37}, "is 2.5e.36, over .*lora_alpha"),
        ({"alpha_pattern": {"v_proj": -1e300}}, "v_proj.*over .*alpha_pattern"),
        ({"target_modules": "(a+)+b"}, "target_modules"),
        ({"target_modules": "("}, "target_modules"),
        ({"target_modules": ".*" * 20 + "X"}, "target_modules.*at most 4 repeats"),
        ({"exclude_modules": "(?:.|..)*X"}, "exclude_modules"),
        ({"exclude_modules": ".?" * 30 + "X"}, "exclude_modules"),
        ({"target_modules": "(?:.|..)" * 30 + "X"}, "target_modules"),
        ({"target_modules": ".{0,99}" * 5 + "X"}, "target_modules"),
        ({"alpha_pattern": {"a*a*a*a*a*b": 2}}, "alpha_pattern"),
        ({"rank_pattern": {f".*.*.*{i}": 2 for i in range(200)}}, "rank_pattern"),
        ({"rank_pattern": {"x(?i)": 2}}, "rank_pattern"),
        ({"rank_pattern": {"(x*)*": 2}}, "rank_pattern"),
        ({"layers_to_transform": "all"}, "layers_to_transform"),
        ({"r": 8}, r"lora_A.*shape \[4, \d+\], this model and rank 8 take \[8, \d+\]"),
    ],
)
def test_refused_configs(
    config: dict[str, Any], said: str, model: Any, spec: ModelSpec, pairs: Any, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModel, match=said):
        read_adapter(write(tmp_path / "a", model, pairs, **config), spec, 16)


def test_expressions_that_trainers_write_are_read(model: Any, spec: ModelSpec, pairs: Any, tmp_path: Path) -> None:
    """As Unsloth writes them for the text of models that see: four open repeats, and texts of which one fits."""
    kinds, parts = (
        "self_attn|attention|attn|mlp|feed_forward|ffn",
        "k_proj|v_proj|q_proj|o_proj|gate_proj|up_proj|down_proj",
    )
    everywhere = rf"(?:.*?(?:language|text).*?(?:{kinds}).*?(?:{parts}).*?)"
    linears = rf"(?:(?:\bmodel\.)?layers\.[\d]{{1,}}\.(?:{kinds})\.(?:(?:{parts})))|(?:lm_head|model\.embed_tokens)"
    folder = write(tmp_path / "a", model, pairs, target_modules=f"{everywhere}|{linears}")
    assert read_adapter(folder, spec, 16)


@pytest.mark.parametrize("is_embedding", [False, True])
def test_rank_1_is_copied_out_of_its_file(is_embedding: bool) -> None:
    a, b = torch.randn(1, 48), torch.randn(32, 1)
    packed = LowRank.pack(a, b, is_embedding=is_embedding)
    kept = packed.a.clone(), packed.b.clone()
    a.zero_(), b.zero_()
    assert packed.a.equal(kept[0]) and packed.b.equal(kept[1])


def test_any_factor_times_any_scale_is_a_float32() -> None:
    assert torch.finfo(torch.float32).max > MAX_FACTOR * MAX_SCALE


def test_a_slot_that_could_not_be_filled_is_empty(spec: ModelSpec) -> None:
    """What it had before comes back whole, and no request finds a part of the other."""
    table = LoraTable(spec, 1)
    for name in ("one", "two"):
        table.make(name, 16, 8)
    bank = LoraBank(table, 4)
    part = LowRank.pack(torch.ones(2, 8), torch.ones(16, 2))
    bank._adapters = {
        1: Adapter({"one": [part], "two": [part]}, 2),
        2: Adapter({"one": [part], "two": [replace(part, scale=1e39)]}, 2),
    }
    good, bad = (LoraUse("good", 1, 1.0),), (LoraUse("bad", 2, 2.0),)
    bank.enter(0, good)
    before = [weights.records.clone() for weights in table.values()]
    with pytest.raises(OverflowError):
        bank.enter(0, bad)
    bank.enter(0, good)
    assert all(weights.records.equal(one) for weights, one in zip(table.values(), before))
    assert all(weights.terms[0][0].scale == 1.0 for weights in table.values())
    bank.close()


@pytest.mark.parametrize("width", [24, 40_000])
def test_settled_matrices_are_the_same_and_lie_in_a_row(width: int) -> None:
    """Small ones, and more than a huge page."""
    parts = [LowRank.pack(torch.randn(5, width), torch.randn(33, 5), first) for first in (0, 33)]
    other = LowRank.pack(torch.randn(2, width).bfloat16(), torch.randn(7, 2).bfloat16())
    settled = settle(Adapter({"one": parts, "two": [other]}, 5))
    for before, after in zip([*parts, other], [*settled.parts["one"], *settled.parts["two"]]):
        assert after.a.equal(before.a) and after.b.equal(before.b) and replace(after, a=before.a, b=before.b) == before
    one, two = settled.parts["one"]
    addresses = [each.data_ptr() for each in (one.a, two.a, one.b, two.b, settled.parts["two"][0].a)]
    assert addresses == sorted(addresses) and all(address % 64 == 0 for address in addresses)


def test_refused_files(model: Any, spec: ModelSpec, pairs: Any, tmp_path: Path) -> None:
    good = write(tmp_path / "good", model, pairs)
    tensors = load_file(good / "adapter_model.safetensors")
    first = next(iter(tensors))

    def refuse(said: str, changed: dict[str, torch.Tensor] | None = None, max_rank: int = 16) -> None:
        folder = tmp_path / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        if changed is not None:
            save_file(changed, folder / "adapter_model.safetensors")
        with pytest.raises(InvalidModel, match=said):
            read_adapter(folder, spec, max_rank)

    refuse("rank 4 is over max_lora_rank=2", max_rank=2)
    refuse("has no lora_A|is missing|has no lora_B", {name: one for name, one in tensors.items() if name != first})
    refuse("NaN or infinity", {**tensors, first: tensors[first] * float("nan")})
    refuse("no low-rank matrix", {**tensors, first: tensors[first][0].contiguous()})
    refuse("no low-rank matrix", {**tensors, first: tensors[first].long()})
    refuse(
        "no part of a low-rank product.*penstock merge",
        {**tensors, "base_model.model.lm_head.weight": torch.zeros(3, 3)},
    )
    strange = {f"base_model.model.strange.lora_{half}.weight": torch.zeros(4, 4) for half in "AB"}
    refuse("no linear of this", strange)
    wide = oracle.make("LlamaForCausalLM", {**FAMILIES["LlamaForCausalLM"].like[0], "hidden_size": 128})
    other = adapters.write(tmp_path / "wide", wide, adapters.make_pairs(wide, RANK, 1, ("q_proj",)))
    with pytest.raises(InvalidModel, match=r"q_proj.lora_A.*shape \[4, 128\].*take \[4, \d+\].*another model"):
        read_adapter(other, spec, 16)
    (good / "adapter_model.safetensors").rename(good / "adapter_model.bin")
    with pytest.raises(InvalidModel, match=r"adapter_model.bin is a pickle.*safe_serialization=True"):
        read_adapter(good, spec, 16)
    (good / "adapter_model.bin").unlink()
    with pytest.raises(InvalidModel, match="has no adapter_model.safetensors"):
        read_adapter(good, spec, 16)
    with pytest.raises(InvalidModel, match="is no folder"):
        read_adapter(tmp_path / "nowhere", spec, 16)


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    like = FAMILIES["MixtralForCausalLM"].like[0]
    spec = spec_from_config({"architectures": ["MixtralForCausalLM"], **like})
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1"
    save_file(
        {
            f"{name}.lora_A.weight": torch.zeros(2, like["hidden_size"]),
            f"{name}.lora_B.weight": torch.zeros(like["intermediate_size"], 2),
        },
        tmp_path / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["w1"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModel, match=r"experts.0.w1.*experts, positions or kv_b_proj; on a GPU and with ranks"):
        read_adapter(tmp_path, spec, 16)


def test_damaged_files_end_with_one_line(model: Any, spec: ModelSpec, pairs: Any, tmp_path: Path) -> None:
    """Random damage to either file is refused, or changes numbers alone."""
    good, rng = write(tmp_path / "good", model, pairs), random.Random(5)
    files = {path.name: path.read_bytes() for path in good.iterdir()}
    num_refused = 0
    for _ in range(NUM_MUTANTS):
        name, data = rng.choice(list(files.items()))
        mutant = bytearray(data)
        span = min(len(data), 2048)
        for _ in range(rng.randint(1, 4)):
            mutant[rng.randrange(span)] = rng.randrange(256)
        if rng.random() < 0.2:
            del mutant[rng.randrange(len(mutant)) :]
        (good / name).write_bytes(mutant)
        try:
            read_adapter(good, spec, 16)
        except InvalidModel as error:
            num_refused += 1
            assert "\n" not in str(error)
        (good / name).write_bytes(data)
    assert num_refused > NUM_MUTANTS // 2
