"""Choose a GGUF type for each tensor: the usual mixes give more bits to what hurts more."""

from __future__ import annotations

from dataclasses import dataclass

# mix → the type of most matrices, and general.file_type
MIXES: dict[str, tuple[str, int]] = {
    "F32": ("F32", 0),
    "F16": ("F16", 1),
    "BF16": ("BF16", 32),
    "Q8_0": ("Q8_0", 7),
    "Q4_0": ("Q4_0", 2),
    "Q4_1": ("Q4_1", 3),
    "Q5_0": ("Q5_0", 8),
    "Q5_1": ("Q5_1", 9),
    "Q2_K": ("Q2_K", 10),
    "Q2_K_S": ("Q2_K", 21),
    "Q3_K": ("Q3_K", 12),
    "Q3_K_S": ("Q3_K", 11),
    "Q3_K_M": ("Q3_K", 12),
    "Q3_K_L": ("Q3_K", 13),
    "Q4_K": ("Q4_K", 15),
    "Q4_K_S": ("Q4_K", 14),
    "Q4_K_M": ("Q4_K", 15),
    "Q5_K": ("Q5_K", 17),
    "Q5_K_S": ("Q5_K", 16),
    "Q5_K_M": ("Q5_K", 17),
    "Q6_K": ("Q6_K", 18),
}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
# Rows that do not divide into blocks of 256 take a type with blocks of 32 and about as many bits.
NARROW = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
FLOATS = ("F32", "F16", "BF16")
KEPT = (
    *("position_embd", "token_types", "rope_freqs", "rope_factors_long", "rope_factors_short"),
    *("ffn_gate_inp", "ffn_gate_inp_shexp", "attn_sinks"),
)


@dataclass(frozen=True)
class Model:
    """The facts of a model that a mix looks at."""

    architecture: str
    num_layers: int
    queries_per_kv: int
    has_output: bool  # a head of its own, not the embedding


def choose_type(mix: str, name: str, shape: tuple[int, ...], model: Model) -> str:
    """Return the type of a tensor by its name in the file."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    if len(shape) < 2 or module in KEPT or not name.endswith(".weight") or module.endswith("norm"):
        return "F32"
    mix = ALIASES.get(mix, mix)
    usual = MIXES[mix][0]
    if usual in FLOATS:
        return usual
    is_head = module == "output" or (module == "token_embd" and not model.has_output)
    if is_head:
        chosen = "Q8_0" if usual == "Q8_0" else "Q6_K"
    else:
        layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
        role = module.removesuffix("_exps").removesuffix("_shexp")
        chosen = _by_role(mix, role, layer, model) or usual
    if chosen.endswith("_K") and shape[-1] % 256:
        chosen = NARROW[chosen]
    return chosen if shape[-1] % 32 == 0 else "F16"


def _gets_more(layer: int, count: int) -> bool:
    """The first and last eighth of the layers and every third between."""
    return layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2


def _by_role(mix: str, module: str, layer: int, model: Model) -> str | None:
    count = model.num_layers
    more, early = _gets_more(layer, count), layer < count // 8
    by_module: dict[str, dict[str, str | None]] = {
        "attn_v": {
            "Q2_K": "Q4_K" if model.queries_per_kv >= 4 else "Q3_K",
            "Q2_K_S": "Q4_K" if model.queries_per_kv >= 4 else None,
            "Q3_K_M": "Q5_K" if layer < 2 else "Q4_K",
            "Q3_K_L": "Q5_K",
            "Q4_K_S": "Q5_K" if layer < 4 else None,
            "Q4_K_M": "Q6_K" if more else None,
            "Q5_K_M": "Q6_K" if more else None,
        },
        "attn_qkv": {"Q3_K_M": "Q4_K", "Q3_K_L": "Q4_K", "Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"},
        "attn_output": {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"},
        "ffn_down": {
            "Q2_K": "Q3_K",
            "Q2_K_S": "Q4_K" if early else None,
            "Q3_K_M": "Q5_K" if layer < count // 16 else "Q4_K",
            "Q3_K_L": "Q5_K",
            "Q4_K_S": "Q5_K" if early else None,
            "Q4_K_M": "Q6_K" if more else None,
            "Q5_K_M": "Q6_K" if more else None,
            "Q4_0": "Q4_1" if early else None,
            "Q5_0": "Q5_1" if early else None,
        },
    }
    if model.architecture == "falcon" and module == "attn_output":
        return None
    return by_module.get(module, {}).get(mix)
