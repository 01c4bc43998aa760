"""How checkpoints spell the parameters: tables from a checkpoint's module names to ours, joined with `|`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Layout = Literal["plain", "transposed", "grouped", "one_plus"]

SUFFIXES = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


@dataclass(frozen=True)
class Stored:
    """Where a module's tensors belong, and how their values lie.

    `transposed` is [in, out]; `grouped` holds for each key/value head its queries, its key and its value in turn;
    `one_plus` is a norm weight stored less one.
    """

    name: str
    layout: Layout = "plain"


IGNORED = Stored("")  # buffers and heads that no computation here reads


@dataclass(frozen=True)
class Names:
    """Module names without the optional prefixes; those of a layer without the stack's name and the layer's number."""

    prefixes: tuple[str, ...] = ()
    stack: str = ""
    model: Mapping[str, Stored | str] = field(default_factory=dict)
    layer: Mapping[str, Stored | str] = field(default_factory=dict)

    def __or__(self, other: Names) -> Names:
        prefixes = self.prefixes + tuple(p for p in other.prefixes if p not in self.prefixes)
        return Names(prefixes, other.stack or self.stack, {**self.model, **other.model}, {**self.layer, **other.layer})

    def find(self, tensor: str) -> Stored | None:
        """Our name for a checkpoint's tensor and its layout; IGNORED, or None for one the table does not know."""
        for prefix in sorted(self.prefixes, key=len, reverse=True):
            if tensor.startswith(prefix):
                tensor = tensor[len(prefix) :]
                break
        module, _, suffix = tensor.rpartition(".")
        inside = re.fullmatch(rf"{re.escape(self.stack)}\.(\d{{1,6}})\.(.+)", module)
        found = self.layer.get(inside[2]) if inside else self.model.get(module)
        if found is None or found is IGNORED:
            return found if found is None else IGNORED
        if suffix not in SUFFIXES:
            return None
        stored = Stored(found) if isinstance(found, str) else found
        where = f"layers.{int(inside[1])}." if inside else ""
        return Stored(f"{where}{stored.name}.{SUFFIXES[suffix]}", stored.layout)

    def spelling(self, parameter: str) -> str:
        """How a checkpoint of this family names one of our parameters; our own name where the table has none."""
        inside = re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", parameter)
        module, suffix = (inside[2], inside[3]) if inside else parameter.rpartition(".")[::2]
        for spelled, stored in (self.layer if inside else self.model).items():
            if module == (stored if isinstance(stored, str) else stored.name):
                return f"{self.stack}.{inside[1]}.{spelled}.{suffix}" if inside else f"{spelled}.{suffix}"
        return parameter


LLAMA = Names(
    prefixes=("model.",),
    stack="layers",
    model={"embed_tokens": "embedding.tokens", "norm": "norm", "lm_head": "head.rows", "rotary_emb": IGNORED},
    layer={
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "attention.q",
        "self_attn.k_proj": "attention.k",
        "self_attn.v_proj": "attention.v",
        "self_attn.o_proj": "attention.out",
        "self_attn.rotary_emb": IGNORED,
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
    },
)

QK_NORM = Names(layer={"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"})

# Norms on both sides of attention and MLP (Gemma 2), or after them only (OLMo 2).
OUT_NORMS = Names(
    layer={
        "post_attention_layernorm": "attention_out_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    }
)

MERGED = Names(layer={"self_attn.qkv_proj": "attention.qkv", "mlp.gate_up_proj": "mlp.gate_up"})

PLAIN_MLP = Names(layer={"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"})


def one_plus(names: Names) -> Names:
    """The same table with every norm weight stored less one (Gemma)."""

    def change(modules: Mapping[str, Stored | str]) -> dict[str, Stored | str]:
        return {
            spelled: Stored(stored, "one_plus") if isinstance(stored, str) and stored.endswith("norm") else stored
            for spelled, stored in modules.items()
        }

    return Names(names.prefixes, names.stack, change(names.model), change(names.layer))
