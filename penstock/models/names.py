"""Tables from a checkpoint's module names to ours, joined with `|`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Layout = Literal[
    "plain",
    "transposed",
    "grouped",
    "one_plus",
    "stacked",
    "stack",
    "stack_transposed",
    "alternating",
    "alternating_transposed",
]

SUFFIXES = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


@dataclass(frozen=True)
class Stored:
    """Our name of a module, and the layout of its tensors.

    `transposed` is [in, out]; `grouped` holds for each key/value head its queries, its key and its value in turn;
    `one_plus` is a norm weight stored less one; `stacked` has a first dimension for the `*` of our name.
    A stack of matrices that is one parameter is a `stack` [E, O, C] or `stack_transposed` [E, C, O]; in `alternating`
    ones gates and ups are stored in turn. `kind` says what a tensor is whose name does not end in it.
    """

    name: str
    layout: Layout = "plain"
    kind: Literal["weight", "bias"] = "weight"


WITH_SUFFIX: tuple[Layout, ...] = ("plain", "transposed", "grouped", "one_plus")
IGNORED = Stored("")  # buffers and heads that no computation here reads


@dataclass(frozen=True)
class Names:
    """Module names without the optional prefixes; those of a layer without the stack's name and the layer's number.
    In a layer's names a `*` stands for one number: `"experts.*.w1": "mlp.experts.*.gate"`. Names that begin with one of
    `ignored` belong to parts that are not computed here."""

    prefixes: tuple[str, ...] = ()
    stack: str = ""
    model: Mapping[str, Stored | str] = field(default_factory=dict)
    layer: Mapping[str, Stored | str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def __or__(self, other: Names) -> Names:
        prefixes = self.prefixes + tuple(p for p in other.prefixes if p not in self.prefixes)
        model, layer = {**self.model, **other.model}, {**self.layer, **other.layer}
        return Names(prefixes, other.stack or self.stack, model, layer, self.ignored + other.ignored)

    def find(self, tensor: str) -> Stored | None:
        """Return our name for a checkpoint's tensor and its layout; IGNORED, or None if the table does not know it."""
        if "*" in tensor:
            return None
        for prefix in sorted(self.prefixes, key=len, reverse=True):
            if tensor.startswith(prefix):
                tensor = tensor[len(prefix) :]
                break
        if tensor.startswith(self.ignored):
            return IGNORED
        module, _, suffix = tensor.rpartition(".")
        inside = re.fullmatch(rf"{re.escape(self.stack)}\.(\d{{1,6}})\.(.+)", module)
        table, module = (self.layer, inside[2]) if inside else (self.model, module)
        starred, number = take_number(module) or (module, 0)
        for name, kind in ((f"{module}.{suffix}", "weight"), (module, suffix), (starred, suffix)):
            found = table.get(name)
            if found is None:
                continue
            if found is IGNORED or kind not in SUFFIXES:
                return IGNORED if found is IGNORED else None
            stored = Stored(found) if isinstance(found, str) else found
            ours = stored.name.replace("*", str(number)) if "*" in name else stored.name
            where = f"layers.{int(inside[1])}." if inside else ""
            kind = stored.kind if stored.kind != "weight" else SUFFIXES[kind]
            return Stored(f"{where}{ours}.{kind}", stored.layout)
        return None

    def spelling(self, parameter: str) -> str:
        """Return a checkpoint's name of one of our parameters; our own name where the table has none."""
        inside = re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", parameter)
        module, suffix = (inside[2], inside[3]) if inside else parameter.rpartition(".")[::2]
        starred, number = take_number(module) or (module, 0)
        for spelled, found in (self.layer if inside else self.model).items():
            stored = Stored(found) if isinstance(found, str) else found
            if stored.name in (module, starred):
                name = spelled.replace("*", str(number)) + (f".{suffix}" if stored.layout in WITH_SUFFIX else "")
                return f"{self.stack}.{inside[1]}.{name}" if inside else name
        return parameter


def take_number(name: str) -> tuple[str, int] | None:
    """Replace the one number within a name, such as an expert's, by `*`; None where there is none, or more."""
    numbers = re.findall(r"(?<=\.)\d{1,6}(?=\.)", name)
    return (name.replace(f".{numbers[0]}.", ".*."), int(numbers[0])) if len(numbers) == 1 else None


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

EXPERTS = Names(
    layer={
        "mlp.gate": "mlp.router",
        "mlp.gate.e_score_correction": "mlp.selection",
        "mlp.gate.e_score_correction_bias": Stored("mlp.selection", kind="bias"),
        "mlp.experts.*.gate_proj": "mlp.experts.*.gate",
        "mlp.experts.*.up_proj": "mlp.experts.*.up",
        "mlp.experts.*.down_proj": "mlp.experts.*.down",
        "mlp.experts.gate_up_proj": Stored("mlp.experts.gate_up", "stack"),
        "mlp.experts.down_proj": Stored("mlp.experts.down", "stack"),
        "mlp.experts.gate_exps": Stored("mlp.experts.*.gate", "stacked"),
        "mlp.experts.up_exps": Stored("mlp.experts.*.up", "stacked"),
        "mlp.experts.down_exps": Stored("mlp.experts.*.down", "stacked"),
        "mlp.shared_experts.gate_proj": "mlp.shared.gate",
        "mlp.shared_experts.up_proj": "mlp.shared.up",
        "mlp.shared_experts.down_proj": "mlp.shared.down",
        "mlp.shared_expert.gate_proj": "mlp.shared.gate",
        "mlp.shared_expert.up_proj": "mlp.shared.up",
        "mlp.shared_expert.down_proj": "mlp.shared.down",
        "mlp.shared_expert_gate": "mlp.shared_gate",
    }
)

QK_NORM = Names(layer={"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"})

LATENT = LLAMA | Names(
    layer={
        "self_attn.q_a_proj": "attention.q_a",
        "self_attn.q_a_layernorm": "attention.q_norm",
        "self_attn.q_b_proj": "attention.q_b",
        "self_attn.kv_a_proj_with_mqa": "attention.kv_a",
        "self_attn.kv_a_layernorm": "attention.kv_norm",
        "self_attn.kv_b_proj": "attention.kv_b",
    }
)

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

    return replace(names, model=change(names.model), layer=change(names.layer))
