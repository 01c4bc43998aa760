"""Parts that most families share, read from the keys that most configs share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.models.config import (
    LAYER_TYPES,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Config,
    max_model_len,
    max_positions,
    query_factor,
    rope,
)
from penstock.models.experts import Experts, Routing
from penstock.models.latent import LatentAttentionSpec
from penstock.models.layer import Attention, GatedMlp, LayerNorm, Mlp, Norm, RmsNorm, Rope
from penstock.models.names import Names
from penstock.models.spec import AnyBlock, Embedding, Head, ModelSpec

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
}


def width(c: Config) -> int:
    return c.count("hidden_size", "n_embd", "n_embed", most=MAX_WIDTH)


def num_layers(c: Config) -> int:
    return c.count("num_hidden_layers", "n_layer", most=MAX_LAYERS)


def num_heads(c: Config) -> int:
    return c.count("num_attention_heads", "n_head", most=MAX_HEADS)


def head_size(c: Config, default: int = 0) -> int:
    """Return `head_dim`, else the family's default or an equal share of the width."""
    if not default and c.values.get("head_dim") is None and width(c) % num_heads(c):
        c.refuse("num_attention_heads", f"does not divide hidden_size={width(c)}")
    return c.count("head_dim", default=default or width(c) // num_heads(c), most=MAX_HEAD_SIZE)


def hidden_size(c: Config) -> int:
    return c.count("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * width(c), most=MAX_HIDDEN)


def activation(c: Config, *names: str, default: str) -> str:
    return c.choice(*(names or ("hidden_act",)), choices=ACTIVATIONS, default=default)


def rms_norm(c: Config, size: int | None = None, eps: float = 1e-6) -> RmsNorm:
    return RmsNorm(size or width(c), c.number("rms_norm_eps", default=eps, most=1.0))


def layer_norm(c: Config, *names: str, eps: float = 1e-5) -> LayerNorm:
    return LayerNorm(width(c), c.number(*names, default=eps, most=1.0) if names else eps)


def attention(
    c: Config,
    *,
    rope: Rope | None = None,
    size: int | None = None,
    num_kv_heads: int | None = None,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    alibi: Sequence[float] = (),
    qkv_bias: bool = False,
    out_bias: bool = False,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> Attention:
    heads, size = num_heads(c), size or head_size(c)
    kv_heads = num_kv_heads or c.count("num_key_value_heads", default=heads, most=MAX_HEADS)
    if heads % kv_heads:
        c.refuse("num_key_value_heads", f"gives {kv_heads} key/value heads: they must divide {heads} query heads")
    return Attention(
        width(c),
        heads,
        kv_heads,
        size,
        size**-0.5 if scale is None else scale,
        rope,
        window,
        softcap,
        tuple(alibi),
        qkv_bias,
        out_bias,
        q_norm,
        k_norm,
    )


def latent_attention(
    c: Config, *, ranks: tuple[int, int], sizes: tuple[int, int], value_size: int, interleaved: bool
) -> LatentAttentionSpec:
    """Read latent attention. `ranks` of queries and of keys and values, `sizes` of a head's plain and rotated parts,
    and `value_size` are the family's defaults."""
    c.ignore("head_dim", "qk_head_dim")  # of what is rotated; the sum of both sizes
    heads = num_heads(c)
    if c.count("num_key_value_heads", default=heads, most=MAX_HEADS) != heads:
        c.refuse("num_key_value_heads", f"is not supported: {heads} heads share one latent, so it must be {heads}")
    is_whole = "q_lora_rank" in c.values and c.values["q_lora_rank"] is None
    query_rank = 0 if is_whole else c.count("q_lora_rank", default=ranks[0], most=MAX_WIDTH)
    nope = c.count("qk_nope_head_dim", default=sizes[0], most=MAX_HEAD_SIZE)
    turned = c.count("qk_rope_head_dim", default=sizes[1], most=MAX_HEAD_SIZE)
    return LatentAttentionSpec(
        width(c),
        heads,
        query_rank,
        c.count("kv_lora_rank", default=ranks[1], most=MAX_WIDTH),
        nope,
        turned,
        c.count("v_head_dim", default=value_size, most=MAX_HEAD_SIZE),
        (nope + turned) ** -0.5 * query_factor(c),
        replace(rope(c, turned), interleaved=interleaved),
        1e-6,
        c.flag("attention_bias", False),
    )


def mlp(c: Config, kind: str, bias: bool) -> Mlp:
    return Mlp(width(c), hidden_size(c), kind, bias)


def gated_mlp(c: Config, kind: str, bias: bool = False) -> GatedMlp:
    return GatedMlp(width(c), hidden_size(c), kind, bias)


MAX_EXPERTS = 1024
PANEL = 16  # outputs that are stored side by side: an expert's own must fill whole panels
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NUM_CHOSEN = ("num_experts_per_tok", "moe_k")


def experts(
    c: Config, hidden: str = "intermediate_size", *, count: int = 8, chosen: int = 2, shared: int = 0, **options: Any
) -> Experts:
    """Read a mixture of experts: `hidden` names their width, `count` and `chosen` are the family's defaults, `shared`
    is the width of a shared expert. Options are fields of `Routing` and `Experts`, `bias` of an expert's products,
    and the `kind` of activation where the config does not say it."""
    c.ignore("router_aux_loss_coef", "output_router_logits")
    kind = options.pop("kind", "") or activation(c, default="silu")
    num_experts = c.count(*NUM_EXPERTS, default=count, most=MAX_EXPERTS)
    size = c.count(hidden, most=MAX_HIDDEN)
    for key, value in ((hidden, size), ("hidden_size", width(c))):
        if value % PANEL:
            c.refuse(key, f"is not supported with experts: it must be a multiple of {PANEL}")
    routing = {name: options.pop(name) for name in list(options) if name in Routing.__dataclass_fields__}
    rule = Routing(c.count(*NUM_CHOSEN, default=chosen, most=num_experts), **routing)
    groups, left = divmod(num_experts, rule.num_groups)
    if left or groups < rule.best_of_group or rule.top_groups > rule.num_groups:
        c.refuse("n_group", f"does not divide {num_experts} experts into groups of at least {rule.best_of_group}")
    if rule.num_chosen > rule.top_groups * groups:
        c.refuse("num_experts_per_tok", f"is more than the {rule.top_groups * groups} experts of the groups chosen")
    beside = GatedMlp(width(c), shared, kind) if shared else None
    one = GatedMlp(width(c), size, kind, options.pop("bias", False))
    return Experts(one, num_experts, rule, shared=beside, **options)


def window(c: Config, default: int = 0) -> int:
    """Return `sliding_window`; 0 if it is null, or absent without a family default."""
    if "sliding_window" in c.values and c.values["sliding_window"] is None:
        default = 0
    return c.count("sliding_window", default=default, most=MAX_POSITIONS)


def windows(c: Config, size: int, otherwise: Sequence[bool]) -> list[int]:
    """Return each layer's window: by `layer_types`, or `otherwise` if it is absent."""
    types = c.choices("layer_types", LAYER_TYPES, num_layers(c))
    slides = [kind == "sliding_attention" for kind in types] if types else list(otherwise)
    if any(slides) and not size:
        c.refuse("sliding_window", "is off, but some layers slide: set the window's size")
    return [size if slide else 0 for slide in slides]


def alibi_slopes(count: int) -> list[float]:
    """Return 2^(-8/n), 2^(-16/n), … for a power of two n; further heads take every other slope of 2n."""
    power = 1 << (count.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(count - power)]


def vocab_size(c: Config) -> int:
    return c.count("vocab_size", most=MAX_VOCAB)


def embedding(
    c: Config,
    *,
    row_width: int = 0,
    scale: float = 1.0,
    num_positions: int = 0,
    position_offset: int = 0,
    num_types: int = 0,
    norm: Norm | None = None,
) -> Embedding:
    return Embedding(vocab_size(c), width(c), row_width, scale, num_positions, position_offset, num_types, norm)


def model(
    c: Config,
    *,
    layers: Sequence[AnyBlock],
    norm: Norm | None,
    names: Names,
    tied: bool,
    embed: Embedding | None = None,
    positions: int | None = None,
    divisor: float = 1.0,
    softcap: float = 0.0,
    head: bool = True,
) -> ModelSpec:
    """Build the spec: `tied` is the family's default for tie_word_embeddings, `positions` its context length."""
    context = positions or max_positions(c)
    embed = embed or embedding(c)
    top = Head(
        embed.vocab_size, embed.width, embed.row_width, c.flag("tie_word_embeddings", tied), False, divisor, softcap
    )
    std = c.number("initializer_range", "init_std", default=0.02, most=10.0)
    return ModelSpec(
        embed, tuple(layers), norm, top if head else None, names, context, max_model_len(c, context), init_std=std
    )
