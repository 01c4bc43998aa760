"""Reading a config: everything understood or refused by name, and never anything but our own error."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.group import LAYOUTS
from penstock.errors import InvalidConfig, InvalidModel
from penstock.models.decoder import Decoder
from penstock.models.layer import Attention, LongScaling, YarnScaling
from penstock.models.load import load_model
from penstock.models.names import LLAMA
from penstock.models.spec import FAMILIES, ModelSpec, spec_from_config
from tests.models.known_configs import GEMMA_3_270M, KNOWN, LLAMA_3_1_8B, PHI_3_MINI_128K, QWEN2_5_0_5B, SMOLLM2_135M
from tests.models.known_moe_configs import QWEN3_30B_A3B
from tests.models.paged import Paged

TINY = {"architectures": ["LlamaForCausalLM"], **FAMILIES["LlamaForCausalLM"].like[0]}
ABSURD = [
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    7,
    2**31,
    2**64,
    10**40,
    -0.5,
    0.0,
    0.3,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "silu",
    "8",
    [],
    [1],
    [None],
    {},
    {"a": 1},
    {"rope_type": "yarn"},
    {"rope_type": "spiral"},
    [[1]] * 3,
]


def attentions(spec: ModelSpec) -> list[Attention]:
    found = [layer.mixer for layer in spec.layers]
    assert all(isinstance(one, Attention) for one in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("name", KNOWN)
def test_known_checkpoints(name: str) -> None:
    config, num_parameters = KNOWN[name]
    assert spec_from_config(copy.deepcopy(config)).num_parameters == num_parameters


def test_qwen3_coder_says_what_every_qwen3_moe_does() -> None:
    more = {"use_qk_norm": True, "shared_expert_intermediate_size": 0, "qkv_bias": False}
    assert spec_from_config(QWEN3_30B_A3B | more) == spec_from_config(QWEN3_30B_A3B)
    for key, value in {"use_qk_norm": False, "shared_expert_intermediate_size": 8, "qkv_bias": True}.items():
        with pytest.raises(InvalidModel, match=f"config key {key}=.* is not supported"):
            spec_from_config(QWEN3_30B_A3B | {key: value})


def test_gemma3_layers_are_full_every_sixth() -> None:
    spec = spec_from_config(GEMMA_3_270M)
    kinds = [state.kind for state in spec.states() if state is not None]
    assert kinds == (["window"] * 5 + ["full"]) * 3
    near, far = attentions(spec)[0].rope, attentions(spec)[5].rope
    assert near is not None and far is not None
    assert (near.theta, far.theta) == (10000.0, 1000000.0)
    sizes = {name: next(s.bytes_per_position for s in spec.states(layout) if s) for name, layout in LAYOUTS.items()}
    assert sizes == {"float32": 2048, "bfloat16": 1024, "float16": 1024, "int8": 2 * (256 + 4), "fp8": 512, "int4": 320}


def test_a_window_as_long_as_the_context_is_no_window() -> None:
    config = TINY | {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    assert {s.kind for s in spec_from_config(config).states() if s} == {"window"}
    assert {s.kind for s in spec_from_config(config, max_model_len=64).states() if s} == {"full"}


def test_old_and_new_rope_spelling_agree() -> None:
    old = copy.deepcopy(LLAMA_3_1_8B)
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **old["rope_scaling"]}
    assert spec_from_config(old) == spec_from_config(new)
    assert spec_from_config(old | {"rope_scaling": {**old["rope_scaling"], "type": "llama3"}}) == spec_from_config(old)


def test_gpt_neox_under_its_three_spellings() -> None:
    config = {"architectures": ["GPTNeoXForCausalLM"], **FAMILIES["GPTNeoXForCausalLM"].like[0]}
    old = config | {"rotary_pct": 0.5, "rotary_emb_base": 500}
    assert spec_from_config(old) == spec_from_config(old | {"partial_rotary_factor": 0.5, "rope_theta": 500})
    new = config | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
    assert spec_from_config(old) == spec_from_config(new) != spec_from_config(config)


def test_long_rope_is_chosen_by_the_length() -> None:
    short = attentions(spec_from_config(PHI_3_MINI_128K, max_model_len=4096))[0].rope
    long = attentions(spec_from_config(PHI_3_MINI_128K, max_model_len=4097))[0].rope
    assert short is not None and isinstance(short.scaling, LongScaling)
    assert long is not None and isinstance(long.scaling, LongScaling)
    assert list(short.scaling.factors) == PHI_3_MINI_128K["rope_scaling"]["short_factor"]
    assert list(long.scaling.factors) == PHI_3_MINI_128K["rope_scaling"]["long_factor"]
    assert short.scaling.attention_factor == long.scaling.attention_factor == pytest.approx(1.1902380714238083)


def test_yarn_extends_the_context() -> None:
    spec = spec_from_config(
        QWEN2_5_0_5B | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
    )
    assert spec.max_positions == spec.max_model_len == 131072
    rope = attentions(spec)[0].rope
    assert rope is not None and isinstance(rope.scaling, YarnScaling)
    assert rope.scaling.attention_factor == pytest.approx(1.1386294361119891)


def test_max_model_len_is_bounded() -> None:
    assert spec_from_config(SMOLLM2_135M, max_model_len=100).max_model_len == 100
    with pytest.raises(InvalidConfig, match="max_model_len=8193 exceeds the model's context of 8192"):
        spec_from_config(SMOLLM2_135M, max_model_len=8193)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_scaling.rope_type='spiral' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 3}}, "rope_scaling.wobble=3 is unknown"),
        ({"rope_scaling": "linear"}, "rope_scaling must be a JSON object"),
        ({"rope_interleaved": True}, "rope_interleaved=True is not supported"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not supported: the known values are silu"),
        ({"attention_bias": "yes"}, "attention_bias='yes' must be true or false"),
        ({"attn_temperature": 0.5}, "attn_temperature=0.5 is unknown and may change the results"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000 is out of range: .* from 1 to 1024"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True is out of range"),
        ({"num_attention_heads": 5}, "num_attention_heads=5 does not divide hidden_size=64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 gives 3 key/value heads: they must divide 4"),
        ({"head_dim": 7}, "rotates 7 of a head's 7 dimensions"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05 is out of range"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True is not supported"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": ["MambaForCausalLM"]}, "unknown architecture MambaForCausalLM: the known ones are ArceeFor"),
        ({"architectures": ["GPT2LMHeadModel"], "n_positions": 64, "add_cross_attention": True}, "add_cross_attention"),
        ({"architectures": ["BloomForCausalLM"], "apply_residual_connection_post_layernorm": True}, "apply_residual"),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (
            {"architectures": ["GemmaForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention=True",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention", "full_attention"]},
            "sliding_window",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear_attention"] * 2},
            "must be a list of 2 out of",
        ),
    ],
)
def test_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidModel, match=said) as caught:
        spec_from_config(TINY | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_key_that_is_off_is_accepted(value: object) -> None:
    assert spec_from_config(TINY | {"attn_temperature": value}) == spec_from_config(TINY)


def accepted(config: dict[str, Any], max_model_len: int | None = None) -> ModelSpec | None:
    try:
        spec = spec_from_config(config, max_model_len)
    except (InvalidModel, InvalidConfig):
        return None
    assert spec.num_parameters > 0 and len(spec.states()) == spec.num_layers
    return spec


def runs(spec: ModelSpec) -> None:
    """A few tokens through dummy weights."""
    model = load_model(None, spec, dummy_seed=0)
    if isinstance(model, Decoder):
        assert len(Paged(model, num_blocks=8).run([[1]], 2, chunk=1)[0].tokens) == 3


@pytest.mark.parametrize("architecture", FAMILIES)
def test_damaged_configs_only_ever_raise_our_errors(architecture: str) -> None:
    """Every key of every tiny config set to every absurd value, inner keys of rope too, and every key removed.

    What is accepted all the same must run."""
    counts = {True: 0, False: 0}
    different: dict[str, ModelSpec] = {}

    def see(damaged: dict[str, Any]) -> None:
        spec = accepted(damaged)
        counts[spec is not None] += 1
        if spec is not None and spec.num_parameters < 200_000 and spec.vocab_size > 1:
            different[str(replace(spec, names=LLAMA, max_positions=0, max_model_len=0, init_std=0))] = spec

    for like in FAMILIES[architecture].like:
        config = {"architectures": [architecture], **like}
        sites: list[tuple[str, ...]] = [(key,) for key in config]
        sites += [(key, inner) for key, value in config.items() if isinstance(value, dict) for inner in value]
        for site in sites:
            for value in ABSURD:
                damaged = copy.deepcopy(config)
                holder = damaged if len(site) == 1 else damaged[site[0]]
                holder[site[-1]] = value
                see(damaged)
            damaged = copy.deepcopy(config)
            del (damaged if len(site) == 1 else damaged[site[0]])[site[-1]]
            see(damaged)
    assert counts[False] > counts[True] > 0
    for spec in different.values():
        runs(replace(spec, max_model_len=min(spec.max_model_len, 64)) if spec.max_model_len > 4 else spec)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_configs_only_ever_raise_our_errors(data: st.DataObject) -> None:
    architecture = data.draw(st.sampled_from(sorted(FAMILIES)))
    like = data.draw(st.sampled_from(FAMILIES[architecture].like))
    keys = [
        *like,
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "sliding_window",
        "layer_types",
        "head_dim",
        "partial_rotary_factor",
        "tie_word_embeddings",
        "initializer_range",
        "original_max_position_embeddings",
    ]
    changes = data.draw(st.dictionaries(st.sampled_from(keys), json_values, max_size=3))
    accepted(
        {"architectures": [architecture], **copy.deepcopy(dict(like)), **changes},
        data.draw(st.none() | st.integers(-1, 200)),
    )


def test_not_an_object() -> None:
    others: list[Any] = [[], "x", 3, None]
    for config in others:
        with pytest.raises(InvalidModel):
            spec_from_config(config)


def test_key_order_does_not_matter() -> None:
    shuffled = list(GEMMA_3_270M.items())
    random.Random(0).shuffle(shuffled)
    assert spec_from_config(dict(shuffled)) == spec_from_config(GEMMA_3_270M)
