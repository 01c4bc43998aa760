"""Options of speculative decoding, by vLLM's names."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from penstock.config.vllm_speculation import OFF as OFF
from penstock.config.vllm_speculation import OFF_SPELLINGS, port_fields
from penstock.config.vllm_speculation import OPTION as OPTION
from penstock.errors import InvalidConfig, quote
from penstock.types.speculation import AUTO as AUTO
from penstock.types.speculation import MAX_DRAFT, METHODS

DRAFT_MODEL, SELF = "draft_model", "self"
HEAD_METHODS = ("medusa", "eagle", "eagle3", "mtp")  # heads on the target's hidden states
MODEL_METHODS = (DRAFT_MODEL, SELF, *HEAD_METHODS)  # a model drafts within the step
ALL_METHODS = (*METHODS, *MODEL_METHODS)
EXACT, REJECTION = "exact", "rejection"
VERIFICATIONS = (EXACT, REJECTION)
MIN_LOOKUP, MAX_LOOKUP = 1, 16  # tokens
DEFAULT_LOOKUP = 2
MAX_ROWS = 1 << 20


@dataclass(frozen=True)
class SpeculativeConfig:
    """`auto` drafts from grammars, the request's own text and earlier answers; the others from one source, or with a
    model."""

    method: str = AUTO
    num_speculative_tokens: int = 8  # of a draft at most; the controller verifies as many as pay
    prompt_lookup_min: int = DEFAULT_LOOKUP  # tokens that must agree with an earlier place
    prompt_lookup_max: int = MAX_LOOKUP  # tokens that are compared
    tree: bool = False  # verify trees: all drafters' lines merged, or a drafting model's likeliest continuations
    corpus: str | None = None  # a text file whose passages are drafted, whatever the method
    model: str = ""  # name or folder of a draft model or of heads
    revision: str = ""
    layers: tuple[int, ...] = ()  # of `self`: those that draft; none: found at the start
    use_heterogeneous_vocab: bool = False  # a draft model's other ids are left out
    verification: str = EXACT
    disable_by_batch_size: int | None = None  # nothing is drafted in steps of more sequences
    suffix_decoding_max_cached_requests: int | None = None  # earlier answers that are kept; None: as many as fit


_RANGES = {
    "num_speculative_tokens": (1, MAX_DRAFT),
    "prompt_lookup_min": (MIN_LOOKUP, MAX_LOOKUP),
    "prompt_lookup_max": (MIN_LOOKUP, MAX_LOOKUP),
    "disable_by_batch_size": (1, MAX_ROWS),
    "suffix_decoding_max_cached_requests": (0, MAX_ROWS),
}


def parse_speculation(text: str) -> SpeculativeConfig | None:
    """Parse `auto`, `off` or a JSON object; None stands for off."""
    if text == AUTO or text.strip().lower() in OFF_SPELLINGS:
        return SpeculativeConfig() if text == AUTO else None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidConfig(
            f'{OPTION}={quote(text)} is not valid: give {AUTO}, {OFF} or a JSON object like {{"method": "ngram"}}'
        )
    values = port_fields(values)
    known = [field.name for field in fields(SpeculativeConfig)]
    for name, value in values.items():
        if name not in known:
            raise InvalidConfig(f"{OPTION} has no {quote(name)}: give {', '.join(known)}")
        _check(name, value)
    if "model" in values:
        values.setdefault("method", DRAFT_MODEL)
    if "layers" in values:
        values["layers"] = tuple(values["layers"])
    if "prompt_lookup_max" in values:
        values.setdefault("prompt_lookup_min", min(DEFAULT_LOOKUP, values["prompt_lookup_max"]))
    made = SpeculativeConfig(**values)
    _check_model(made)
    if made.prompt_lookup_min > made.prompt_lookup_max:
        raise InvalidConfig(
            f"{OPTION}: prompt_lookup_min={made.prompt_lookup_min} is over "
            f"prompt_lookup_max={made.prompt_lookup_max}: lower it, or raise the other"
        )
    return made


def _check_model(made: SpeculativeConfig) -> None:
    """Require what the method needs, and nothing that it has no use for."""
    needs_model = made.method in (DRAFT_MODEL, *HEAD_METHODS) and made.method != "mtp"
    if needs_model and not made.model:
        raise InvalidConfig(f"{OPTION}: method={made.method} needs a model: give the name or folder of one")
    if made.model and not needs_model:
        raise InvalidConfig(f"{OPTION}: method={made.method} takes no model: leave it out, or choose another method")
    if made.tree and made.verification == REJECTION:
        raise InvalidConfig(f"{OPTION}: verification={REJECTION} is for lines of drafts, not for tree: leave one out")
    if made.layers and made.method != SELF:
        raise InvalidConfig(f"{OPTION}: layers are for method={SELF}, not {made.method}: leave them out")
    for name, value in (("use_heterogeneous_vocab", True), ("verification", REJECTION)):
        if getattr(made, name) == value and made.method != DRAFT_MODEL:
            raise InvalidConfig(f"{OPTION}: {name} is for method={DRAFT_MODEL}, not {made.method}: leave it out")


def _check(name: str, value: Any) -> None:
    choices = {"method": ALL_METHODS, "verification": VERIFICATIONS}.get(name)
    if choices is not None:
        if value not in choices:
            raise InvalidConfig(f"{OPTION}: {name}={quote(value)} is unknown: choose one of {', '.join(choices)}")
        return
    if name in ("model", "revision"):
        if not isinstance(value, str) or not value:
            raise InvalidConfig(f"{OPTION}: {name}={quote(value)} must be a name")
        return
    if name == "use_heterogeneous_vocab":
        if not isinstance(value, bool):
            raise InvalidConfig(f"{OPTION}: {name}={quote(value)} must be true or false")
        return
    if name == "layers":
        if not isinstance(value, list) or not value or not all(type(one) is int and one >= 0 for one in value):
            raise InvalidConfig(f"{OPTION}: {name}={quote(value)} must be a list of layers' numbers, like [0, 1, 5]")
        return
    if name == "tree":
        if not isinstance(value, bool):
            raise InvalidConfig(f"{OPTION}: tree={quote(value)} is not valid: give true or false")
        return
    if name == "corpus":
        if value is not None and (not isinstance(value, str) or not value or "\0" in value):
            raise InvalidConfig(f"{OPTION}: corpus={quote(value)} is not valid: give the path of a text file")
        return
    least, most = _RANGES[name]
    if type(value) is not int or not least <= value <= most:
        raise InvalidConfig(f"{OPTION}: {name}={quote(value)} is out of range: it must be {least} to {most}")
