"""PEFT's adapter_config.json, read strictly."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.errors import InvalidModel, quote
from penstock.models.files.json_file import read_object

if sys.version_info >= (3, 11):
    from re import _parser as sre_parse
else:
    import sre_parse

EMBEDDINGS = "embed_tokens"  # that a list of trained tokens is of
CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 4096
MAX_PATTERN = 1000  # characters of a regular expression
MAX_PATTERNS = 4096
MAX_REPEATS = 4  # of unknown length, in one expression; as many as Unsloth writes
MAX_WAYS = 1 << 23  # to try, in all expressions of a key
NAME_LENGTH = 40  # of a module, as `_count_ways` takes it
TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")  # that leave the base's weights alone
READ = (
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights",
)  # fmt: skip
# That say where an adapter comes from, or how it was trained.
IGNORED = (
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "fan_in_fan_out",
    "megatron_core", "peft_version", "runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "peft_config_version", "ensure_weight_tying",
)  # fmt: skip
EXPRESSIONS = f"valid, simple expressions (at most {MAX_REPEATS} repeats, and none of what has choices)"
NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "")
MERGE = "it cannot be computed beside the model: penstock merge MODEL ADAPTER OUT makes a model of both"
SWAPS_STACKS = (0, 19)
BIASES = ("none", "all", "lora_only")
MERGED = frozenset({"use_dora", "bias", "modules_to_save", "trainable_token_indices"})
SERVED = frozenset({"use_dora", "bias", "modules_to_save", "target_parameters"})  # on a CPU, by one rank
REMEDY = {
    "target_parameters": "stacked experts are served on a CPU, without ranks; to merge them, use peft",
    "lora_bias": "biases of lora_B are not read: merge the adapter into the model with peft",
}


@dataclass(frozen=True)
class LoraConfig:
    """Ranks and factors by module, and the modules that have any. Modules go by the base model's names for them."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: Mapping[re.Pattern[str], int]
    alphas: Mapping[re.Pattern[str], float]
    targets: str | tuple[str, ...]  # an expression, or ends of names
    excluded: str | tuple[str, ...]
    layers: frozenset[int] | None  # None: all
    has_magnitudes: bool = False  # DoRA
    has_biases: bool = False  # trained ones, of the base's modules
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # trained rows, by ends of embeddings' names
    wholes: tuple[str, ...] = ()  # modules that are replaced, by ends of their names
    parameters: tuple[str, ...] = ()  # of stacked experts, by ends of their names
    swaps_stacks: bool = False  # a peft that knows which dimension of a square stack is the inputs

    def find_rank(self, module: str) -> int:
        return int(_find(self.ranks, module, self.rank))

    def find_scale(self, module: str) -> float:
        """Return the factor of b · a."""
        rank = self.find_rank(module)
        return _find(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def targets_module(self, module: str, layer: int | None) -> bool:
        """Return whether a module of a layer, or of none, is one that PEFT would have adapted."""
        if self.excluded and _matches(self.excluded, module):
            return False
        if self.targets == "all-linear" or self.targets_parameter(f"{module}.weight"):
            return True
        if not _matches(self.targets, module):
            return False
        named = not isinstance(self.targets, str) and module in self.targets
        return self.layers is None or named or layer in self.layers

    def targets_parameter(self, name: str) -> bool:
        return _matches(self.parameters, name)


def _matches(wanted: str | tuple[str, ...], module: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _find(patterns: Mapping[re.Pattern[str], float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches a module's name."""
    for pattern, value in patterns.items():
        if pattern.match(module):
            return value
    return default


def read_lora_config(folder: Path, allowed: Collection[str] = ()) -> LoraConfig:
    """Read a folder's config. Raises InvalidModel for unknown keys, and for features outside `allowed`."""
    path = folder / CONFIG
    if not path.is_file():
        raise InvalidModel(f"{folder} has no {CONFIG}: name a folder that peft's save_pretrained() wrote")
    values = read_object(path, MAX_CONFIG_BYTES)

    def refuse(key: str, meant: str) -> InvalidModel:
        return InvalidModel(f"{path}: {key}={quote(values.get(key))} is not supported: {meant}")

    if values.get("peft_type") != "LORA":
        raise refuse("peft_type", "only LORA adapters can be loaded")
    if values.get("task_type") not in TASKS:
        raise refuse("task_type", "adapters of CAUSAL_LM models can be loaded")
    if (values.get("bias") or "none") not in (BIASES if "bias" in allowed else ("none",)):
        raise refuse("bias", MERGE if values["bias"] in BIASES else f"choose one of {', '.join(BIASES)}")
    start = values.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        raise refuse(
            "init_lora_weights",
            "it changes the base's weights; save the adapter with path_initial_model_for_weight_conversion",
        )
    for key, value in values.items():
        if key in MERGED and key not in (*READ, *allowed) and value not in NEUTRAL:
            raise refuse(key, MERGE)
        if key not in (*READ, *IGNORED, *MERGED, *allowed) and value not in NEUTRAL:
            raise refuse(key, REMEDY.get(key, "leave it out, or merge the adapter into the model with peft"))
    return replace(
        _make_config(values, refuse),
        has_magnitudes=bool(values.get("use_dora")),
        has_biases=(values.get("bias") or "none") != "none",
        tokens=_read_tokens(values.get("trainable_token_indices") or (), refuse),
        wholes=_read_names("modules_to_save", values, refuse),
        parameters=_read_names("target_parameters", values, refuse),
        swaps_stacks=_read_version(values.get("peft_version")) >= SWAPS_STACKS,
    )


def _read_names(key: str, values: Mapping[str, Any], refuse: Any) -> tuple[str, ...]:
    names = values.get(key) or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise refuse(key, "it must list names")
    return tuple(names)


def _read_version(value: object) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d{1,6}", str(value))[:2])


def _read_tokens(value: Any, refuse: Any) -> dict[str, tuple[int, ...]]:
    """Return trained tokens by the ends of modules' names; a list is of the embedding's."""
    table = value if isinstance(value, dict) else {EMBEDDINGS: value}
    for rows in table.values():
        if not isinstance(rows, list | tuple) or not all(type(row) is int and row >= 0 for row in rows):
            raise refuse("trainable_token_indices", "it must list tokens, or map modules to such lists")
    return {name: tuple(rows) for name, rows in table.items()}


def _make_config(values: Mapping[str, Any], refuse: Any) -> LoraConfig:
    rank, alpha = values.get("r", 8), values.get("lora_alpha", 8)
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise refuse("r", f"a rank is 1 to {MAX_RANK}")
    if not _is_number(alpha):
        raise refuse("lora_alpha", "it must be a finite number")
    stabilized = values.get("use_rslora") or False
    if not isinstance(stabilized, bool):
        raise refuse("use_rslora", "it must be true or false")
    ranks, alphas = (_compile(values.get(key) or {}) for key in ("rank_pattern", "alpha_pattern"))
    if ranks is None or not all(type(each) is int and 1 <= each <= MAX_RANK for each in ranks.values()):
        raise refuse("rank_pattern", f"it maps {EXPRESSIONS} for modules to ranks of 1 to {MAX_RANK}")
    if alphas is None or not all(map(_is_number, alphas.values())):
        raise refuse("alpha_pattern", f"it maps {EXPRESSIONS} for modules to finite numbers")
    targets = _read_targets(values.get("target_modules") or ())
    if targets is None or not (targets or values.get("target_parameters")):
        raise refuse("target_modules", f"it must list names, be all-linear, or be one of {EXPRESSIONS}")
    excluded = _read_targets(values.get("exclude_modules") or ())
    if excluded is None:
        raise refuse("exclude_modules", f"it must list names or be one of {EXPRESSIONS}")
    layers = values.get("layers_to_transform")
    layers = [layers] if type(layers) is int else layers or None
    if layers is not None and not (isinstance(layers, list) and all(type(each) is int for each in layers)):
        raise refuse("layers_to_transform", "it must be a layer's number or a list of them")
    if isinstance(targets, str) and layers is not None:
        raise refuse("layers_to_transform", "peft takes it with a list of target_modules alone")
    chosen = None if layers is None else frozenset(layers)
    return LoraConfig(rank, float(alpha), stabilized, ranks, alphas, targets, excluded, chosen)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _compile(table: object) -> dict[re.Pattern[str], Any] | None:
    """Compile a table's expressions, for the ends of names; None if they are wrong, too many or could take too long."""
    if not isinstance(table, dict) or len(table) > MAX_PATTERNS:
        return None
    try:
        is_simple = sum(map(_measure, table)) <= MAX_WAYS
        return {re.compile(rf"(.*\.)?({each})$"): value for each, value in table.items()} if is_simple else None
    except (re.error, RecursionError, OverflowError):
        return None


def _read_targets(value: Any) -> str | tuple[str, ...] | None:
    """Return names or an expression; None for anything else."""
    if isinstance(value, str):
        try:
            return value if _measure(value) <= MAX_WAYS else None
        except (re.error, RecursionError, OverflowError):
            return None
    if not isinstance(value, list | tuple) or len(value) > MAX_PATTERNS:
        return None
    return tuple(value) if all(isinstance(name, str) for name in value) else None


def _measure(text: str) -> float:
    """Return about how many ways an expression can be tried on a name; infinity for one that can take for ever."""
    if len(text) > MAX_PATTERN:
        return math.inf
    parsed = sre_parse.parse(text)
    return _count_ways(parsed) if _count_repeats(parsed) <= MAX_REPEATS else math.inf


def _count_repeats(parsed: Any) -> int:
    """Count repeats of a length that is open; of alternatives the most, as one alone is tried at a time."""
    total = 0
    for kind, value in parsed:
        parts = [_count_repeats(part) for part in _list_parts(value)]
        total += max(parts, default=0) if kind is sre_parse.BRANCH else sum(parts)
        total += str(kind).endswith("_REPEAT") and min(value[1], NAME_LENGTH) - value[0] > 1
    return total


def _count_ways(parsed: Any) -> float:
    """Multiply choices: a repeat's lengths, and alternatives of which more than one may fit. What is repeated may have
    none of its own."""
    ways = 1.0
    for kind, value in parsed:
        parts = [_count_ways(part) for part in _list_parts(value)]
        if kind is sre_parse.BRANCH:
            ways *= 1 if _excludes_others(value[1]) else sum(parts)
        elif str(kind).endswith("_REPEAT"):
            least, most = (min(each, NAME_LENGTH) for each in value[:2])
            inner = math.prod(parts)
            ways *= math.inf if inner > 1 and value[1] > 1 else (most - least) * inner + 1
        else:
            ways *= math.prod(parts)
    return ways


def _excludes_others(alternatives: Any) -> bool:
    """Return True for plain texts of which none begins another: at most one fits at a place."""
    texts = []
    for each in alternatives:
        if any(kind is not sre_parse.LITERAL for kind, _ in each):
            return False
        texts.append("".join(chr(code) for _, code in each))
    ordered = sorted(texts)
    return not any(after.startswith(before) for before, after in zip(ordered, ordered[1:]))


def _list_parts(value: Any) -> list[Any]:
    """List the expressions within a node of a parsed expression."""
    if isinstance(value, sre_parse.SubPattern):
        return [value]
    return [part for each in value for part in _list_parts(each)] if isinstance(value, list | tuple) else []
