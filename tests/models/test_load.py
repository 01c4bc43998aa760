"""Loading: spellings, layouts, what is missing or too much, dummy weights, dtypes, progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.errors import InvalidModel
from penstock.layers import RmsNorm
from penstock.models.decoder import Decoder
from penstock.models.load import load_model, match
from penstock.models.names import IGNORED, LLAMA, QK_NORM
from penstock.models.names import Stored as StoredAs
from penstock.models.spec import FAMILIES, spec_from_config
from penstock.ops import unpack_panels
from penstock.quant.dense import Dense
from tests.models import oracle
from tests.models.paged import Paged
from tests.models.stored import Stored

PROMPT = [[5, 9, 200, 31, 7]]
Tensors = dict[str, torch.Tensor]


def tiny(architecture: str = "LlamaForCausalLM", number: int = 0, **more: Any) -> Stored:
    like = {**FAMILIES[architecture].like[number], **more}
    tensors = {name: tensor.detach() for name, tensor in oracle.make(architecture, like).state_dict().items()}
    if like.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    return Stored({"architectures": [architecture], **like}, tensors)


def load(checkpoint: Stored, **options: Any) -> Decoder:
    model = load_model(checkpoint, spec_from_config(checkpoint.config), **options)
    assert isinstance(model, Decoder)
    return model


def answer(checkpoint: Stored, **options: Any) -> torch.Tensor:
    return torch.stack(Paged(load(checkpoint, **options)).run(PROMPT, 4, chunk=8)[0].logits)


def renamed(checkpoint: Stored, change: Callable[[str], str]) -> Stored:
    return Stored(checkpoint.config, {change(name): tensor for name, tensor in checkpoint.tensors.items()})


def test_the_prefix_is_optional() -> None:
    checkpoint = tiny()
    bare = renamed(checkpoint, lambda name: name.removeprefix("model."))
    assert torch.equal(answer(checkpoint), answer(bare))


def test_old_spellings() -> None:
    neox = tiny("GPTNeoXForCausalLM")
    assert torch.equal(answer(neox), answer(renamed(neox, lambda name: name.replace("lm_head", "embed_out"))))
    opt = tiny("OPTForCausalLM")
    assert torch.equal(answer(opt), answer(renamed(opt, lambda name: name.replace("model.decoder", "decoder"))))


def test_buffers_and_tied_heads_are_passed_over() -> None:
    checkpoint = tiny(tie_word_embeddings=True)
    expected = answer(checkpoint)
    checkpoint.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    checkpoint.tensors["lm_head.weight"] = torch.zeros(256, 64)
    assert torch.equal(answer(checkpoint), expected)
    gpt2 = tiny("GPT2LMHeadModel")
    expected = answer(gpt2)
    gpt2.tensors["transformer.h.1.attn.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.uint8)
    gpt2.tensors["transformer.h.1.attn.masked_bias"] = torch.tensor(-1e4)
    assert torch.equal(answer(gpt2), expected)


def test_merged_and_separate_projections_are_the_same() -> None:
    checkpoint = tiny("Phi3ForCausalLM")
    split = {}
    for name, tensor in checkpoint.tensors.items():
        if "qkv_proj" in name:
            for letter, part in zip("qkv", tensor.split([64, 32, 32])):
                split[name.replace("qkv_proj", f"{letter}_proj")] = part
        elif "gate_up_proj" in name:
            for word, part in zip(("gate", "up"), tensor.chunk(2)):
                split[name.replace("gate_up", word)] = part
        else:
            split[name] = tensor
    assert len(split) == len(checkpoint.tensors) + 2 * (2 + 1)
    assert torch.equal(answer(checkpoint), answer(Stored(checkpoint.config, split)))


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: None if tensors.pop(name) is None else None


def with_(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without("model.layers.1.mlp.up_proj.weight"), r"'layers.1.mlp.up_proj.weight' of shape \[96, 64\] is missing"),
        (without("model.norm.weight"), r"'norm.weight' of shape \[64\] is missing"),
        (without("lm_head.weight"), "'lm_head.weight' .* is missing"),
        (without("model.layers.0.self_attn.k_proj.weight"), r"'layers.0.self_attn.k_proj.weight' of shape \[32, 64\]"),
        (with_("model.extra.weight", torch.zeros(3)), "'model.extra.weight' is unknown to LlamaForCausalLM"),
        (with_("model.norm.scale", torch.zeros(64)), "'model.norm.scale' is unknown"),
        (with_("model.layers.2.input_layernorm.weight", torch.ones(64)), r"layers.2.* has no place .*\(2 layers\)"),
        (with_("model.layers.0.self_attn.q_proj.bias", torch.ones(64)), "q_proj.bias' has no place in the model"),
        (with_("norm.weight", torch.ones(64)), "'model.norm.weight' and 'norm.weight' are the same parameter"),
        (
            with_("model.norm.weight", torch.ones(65)),
            r"'model.norm.weight' has shape \[65\], but its config says \[64\]",
        ),
        (with_("lm_head.weight", torch.ones(64, 256)), r"'lm_head.weight' has shape \[64, 256\]"),
        (with_("lm_head.weight", torch.ones(256, 64, dtype=torch.int32)), "'lm_head.weight' holds torch.int32"),
    ],
)
def test_damage_is_named(damage: Callable[[Tensors], None], said: str) -> None:
    checkpoint = tiny()
    damage(checkpoint.tensors)
    with pytest.raises(InvalidModel, match=said) as caught:
        load(checkpoint)
    assert "\n" not in str(caught.value) and str(checkpoint.path) in str(caught.value)


def test_nothing_is_read_before_everything_is_checked() -> None:
    checkpoint = tiny()
    del checkpoint.tensors["lm_head.weight"]
    checkpoint.tensor = None  # type: ignore[assignment]
    with pytest.raises(InvalidModel, match="lm_head"):
        load(checkpoint)


def test_every_parameter_of_every_family_has_a_spelling() -> None:
    for name, family in FAMILIES.items():
        for like in family.like:
            spec = spec_from_config({"architectures": [name], **like})
            for parameter in spec.parameters():
                part = parameter.replace("attention.qkv", "attention.q").replace("gate_up", "gate")
                spelled = [spec.names.spelling(one) for one in (parameter, part)]
                assert any(spec.names.find(one) for one in spelled), (name, parameter)


def test_names_join() -> None:
    joined = LLAMA | QK_NORM
    assert joined.find("model.layers.3.self_attn.q_norm.weight") == StoredAs("layers.3.attention.q_norm.weight")
    assert LLAMA.find("model.layers.3.self_attn.q_norm.weight") is None
    assert joined.find("layers.0.self_attn.rotary_emb.inv_freq") is IGNORED
    assert joined.find("model.layers.x.mlp.up_proj.weight") is None
    assert joined.find("") is None and joined.find("model.") is None


def test_dummy_weights_depend_on_seed_and_name_only() -> None:
    config = tiny().config
    spec, deeper = spec_from_config(config), spec_from_config({**config, "num_hidden_layers": 3})

    def down(model: Any, layer: int) -> torch.Tensor:
        scheme = model.blocks[layer].ffn.down.scheme
        assert isinstance(scheme, Dense)
        return unpack_panels(scheme.panels, scheme.num_out)

    one, same, more = (load_model(None, s, dummy_seed=7) for s in (spec, spec, deeper))
    other = load_model(None, spec, dummy_seed=8)
    assert torch.equal(down(one, 1), down(same, 1)) and torch.equal(down(one, 1), down(more, 1))
    assert not torch.equal(down(one, 1), down(other, 1)) and not torch.equal(down(one, 0), down(one, 1))
    assert down(one, 0).std() == pytest.approx(0.02, rel=0.05)
    assert isinstance(one, Decoder) and isinstance(one.norm, RmsNorm)
    assert one.norm.weight.unique().tolist() == [1.0]
    wide = load_model(None, spec_from_config({**config, "initializer_range": 0.5}), dummy_seed=0)
    assert down(wide, 0).std() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.01)])
def test_sixteen_bit_storage(dtype: torch.dtype, tolerance: float) -> None:
    checkpoint = tiny(tie_word_embeddings=True)
    full, half = load(checkpoint), load(checkpoint, dtype=dtype)
    assert half.head.rows is half.embedding.tokens
    assert half.embedding.tokens.num_bytes * 2 == full.embedding.tokens.num_bytes
    assert isinstance(half.norm, RmsNorm) and half.norm.weight.dtype == torch.float32
    expected, found = answer(checkpoint), answer(checkpoint, dtype=dtype)
    assert found.dtype == torch.float32 and not torch.equal(found[:5], expected[:5])
    assert (found[:5] - expected[:5]).abs().max() <= tolerance * expected.abs().max()


def test_stored_dtype_can_be_kept() -> None:
    checkpoint = tiny()
    halves = Stored(checkpoint.config, {name: tensor.bfloat16() for name, tensor in checkpoint.tensors.items()})
    kept = load(halves, dtype=None)
    assert isinstance(kept.head.rows, Dense) and kept.head.rows.panels.dtype == torch.bfloat16
    assert torch.equal(answer(halves, dtype=None), answer(halves, dtype=torch.float32))


def test_progress_ends_at_the_total() -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = tiny()
    load(checkpoint, progress=lambda done, total: seen.append((done, total)))
    spec = spec_from_config(checkpoint.config)
    assert len(seen) == len(spec.parameters()) == len(match(checkpoint, spec))
    assert seen == sorted(seen) and seen[-1] == (spec.num_parameters, spec.num_parameters)


def test_misuse() -> None:
    spec = spec_from_config(tiny().config)
    with pytest.raises(InvalidModel, match="no checkpoint"):
        load_model(None, spec)
    with pytest.raises(InvalidModel, match="dtype=torch.int8"):
        load_model(None, spec, dummy_seed=0, dtype=torch.int8)


def test_too_large_for_memory_is_said() -> None:
    config = {**tiny().config, "vocab_size": 1 << 22, "hidden_size": 1 << 17, "num_attention_heads": 1 << 10}
    with pytest.raises(InvalidModel, match="do not fit in memory"):
        load_model(None, spec_from_config(config), dummy_seed=0)


def test_rope_tables_are_bounded() -> None:
    config = {**tiny().config, "max_position_embeddings": 1 << 24, "head_dim": 512}
    with pytest.raises(InvalidModel, match="max_model_len=16777216 needs"):
        load_model(None, spec_from_config(config), dummy_seed=0)
    assert load_model(None, spec_from_config(config, max_model_len=32), dummy_seed=0).spec.max_model_len == 32
