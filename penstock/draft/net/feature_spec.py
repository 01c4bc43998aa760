"""Drafting layers on the target's features, as data: EAGLE and EAGLE-3, read from their published configs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidConfig, InvalidModel
from penstock.models.config import MAX_VOCAB, Config, rope
from penstock.models.families.parts import activation, attention, gated_mlp, head_size, rms_norm, window
from penstock.models.layer import Attention, Shapes, add_prefix, matrix
from penstock.models.names import IGNORED, LLAMA, QK_NORM, Names
from penstock.models.spec import Block, ModelSpec

LAYER = "layers.0"  # begins our names of all parameters
MAX_TAPS = 16


IGNORED_ROWS = {"embed_tokens": IGNORED, "rotary_emb": IGNORED}  # the target's own are used
DECODER = {**LLAMA.layer, **QK_NORM.layer}
EAGLE = Names(("model.",), "layers", {"fc": f"{LAYER}.fc", "lm_head": IGNORED, **IGNORED_ROWS}, {**DECODER, "fc": "fc"})
EAGLE3_LAYER = {**DECODER, "input_layernorm": "token_norm", "hidden_norm": "hidden_norm"}
EAGLE3 = Names(
    ("model.",),
    "layers",
    {
        "fc": f"{LAYER}.fc",
        "input_norm": f"{LAYER}.input_norm",
        **{f"fc_norm.{i}": f"{LAYER}.fc_norm.{i}" for i in range(MAX_TAPS)},
        "norm": f"{LAYER}.norm",
        "lm_head": f"{LAYER}.head",
        ".d2t": IGNORED,  # read as numbers
        ".t2d": IGNORED,
        **IGNORED_ROWS,
        **{
            f"midlayer.{spelled}": found if found is IGNORED else f"{LAYER}.{found}"
            for spelled, found in EAGLE3_LAYER.items()
        },
    },
    EAGLE3_LAYER,
)
NAMES = {"eagle": EAGLE, "eagle3": EAGLE3}


@dataclass(frozen=True)
class FeatureSpec(ModelSpec):
    """One decoder layer, whose input is made of a token and of features of the target.

    | | input of the layer | of its attention | logits |
    |---|---|---|---|
    | eagle | fc(token, feature) | the same | target's head |
    | eagle3 | feature, from the target as fc(three layers' inputs) | norm(token), norm(feature) | own head of norm |

    EAGLE-3 heads may differ in norms: of all that fc reads (`norm_before_fc`) or of each layer's input (`fc_norm`), of
    the layer's input (`norm_before_residual`), and of the feature that it feeds itself (`norm_output`).
    """

    method: str = ""
    taps: tuple[int, ...] = ()
    num_own_tokens: int = 0  # rows of its own head; 0: it has none
    fc_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    @property
    def mixer(self) -> Attention:
        mixer = self.layers[0].mixer
        assert isinstance(mixer, Attention)
        return mixer

    def parameters(self) -> Shapes:
        width, rows = self.width, sum(self.mixer.rows)
        norm, is_eagle3 = self.layers[0].ffn_norm, self.method == "eagle3"  # type: ignore[attr-defined]
        shapes = matrix("fc", width, (len(self.taps) or 2) * width, self.fc_bias)
        if is_eagle3:
            shapes |= {f"{name}.weight": (width,) for name in ("token_norm", "hidden_norm", "norm")}
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (len(self.taps) * width,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(len(self.taps))}
        if self.num_own_tokens:
            shapes |= matrix("head", self.num_own_tokens, width)
        mixer = self.mixer.parameters()
        mixer["qkv.weight"] = (rows, 2 * width if is_eagle3 else width)
        shapes |= {f"attention.{name}": shape for name, shape in mixer.items()}
        shapes |= add_prefix("mlp", self.layers[0].ffn) | add_prefix("mlp_norm", norm)
        return {f"{LAYER}.{name}": shape for name, shape in shapes.items()}


def read_spec(
    method: str, described: Mapping[str, Any], tensors: Collection[str], target: ModelSpec, max_model_len: int
) -> FeatureSpec:
    """Read the spec of a checkpoint with these tensors. Positions are the target's, whatever the config says."""
    described = flatten(described)
    c = Config({**described, "max_position_embeddings": target.max_positions}, max_model_len)
    width = c.count("hidden_size", most=1 << 20)
    if width != target.width:
        raise InvalidConfig(
            f"speculative_config: {method} was made for hidden states of {width} values, the model has {target.width}: "
            "give the one that was trained for this model"
        )
    biased = any(name.endswith("self_attn.q_proj.bias") for name in tensors)
    normed = any(name.endswith("self_attn.q_norm.weight") for name in tensors)
    size = head_size(c)
    qk_norm = rms_norm(c, size) if normed else None
    types = described.get("layer_types")
    slide = window(c) if isinstance(types, list) and types[:1] == ["sliding_attention"] else 0
    block = Block(
        attention(c, rope=rope(c, size), size=size, window=slide, qkv_bias=biased, q_norm=qk_norm, k_norm=qk_norm),
        gated_mlp(c, activation(c, default="silu")),
        mixer_norm=rms_norm(c),
        ffn_norm=rms_norm(c),
    )
    norms = _read_norms(c, described) if method == "eagle3" else {}
    has_head = method == "eagle3" and any(name.endswith("lm_head.weight") for name in tensors)
    own = c.count("draft_vocab_size", "vocab_size", default=target.vocab_size, most=MAX_VOCAB) if has_head else 0
    return FeatureSpec(
        target.embedding,
        (block,),
        None,
        None,
        NAMES[method],
        target.max_positions,
        max_model_len,
        architecture=method,
        method=method,
        taps=_read_taps(described, target.num_layers) if method == "eagle3" else (),
        num_own_tokens=own,
        fc_bias=any(name.endswith("fc.bias") for name in tensors),
        **norms,  # type: ignore[arg-type]
    )


NORMS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
OWN_KEYS = (*NORMS, "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")  # beside the layer's config


def flatten(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return one config of what the format of vLLM's `speculators` nests."""
    kind = described.get("speculators_model_type")
    if kind is None:
        return described
    inner = described.get("transformer_layer_config")
    if kind != "eagle3" or not isinstance(inner, Mapping):
        raise InvalidModel(
            f"config key speculators_model_type={kind!r} is not supported: heads of this format are read with eagle3 "
            "and a transformer_layer_config alone"
        )
    if described.get("embed_requires_grad"):
        raise InvalidModel("config key embed_requires_grad=True is not supported: a head uses the model's embedding")
    own = {key: described[key] for key in OWN_KEYS if described.get(key) is not None}
    return {"norm_before_residual": True, **inner, **own}


def _read_norms(c: Config, described: Mapping[str, Any]) -> dict[str, bool]:
    nested = described.get("eagle_config")
    inner = Config(nested) if isinstance(nested, Mapping) else c
    return {name: c.flag(name, False) or inner.flag(name, False) for name in NORMS}


def _read_taps(described: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose inputs are read: given by the config, or EAGLE-3's own choice."""
    key = "eagle_aux_hidden_state_layer_ids"
    inner = described.get("eagle_config")
    given = described.get(key) or (inner.get(key) if isinstance(inner, Mapping) else None)
    taps = given if given is not None else [2, num_layers // 2, num_layers - 3]
    if not isinstance(taps, list) or not all(type(tap) is int and 0 <= tap < num_layers for tap in taps) or not taps:
        raise InvalidModel(f"config key {key}={taps!r} must list layers of the model, which has {num_layers}")
    if len(set(taps)) != len(taps):
        raise InvalidModel(f"config key {key}={taps!r} names a layer twice: {num_layers} layers are too few")
    return tuple(taps)
