"""A tokenizer as its files describe it: the backend and its settings, and a bound on how much it lengthens a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.errors import InvalidModel, PenstockError
from penstock.text.tokenizers.rwkv import GreedyMatcher

MAX_GROWTH = 64.0  # published tokenizers stay below 4
MAX_STEPS = 64  # of a kind; published tokenizers have up to 20


def check_expansion(backend: Backend) -> None:
    """Refuse a tokenizer whose steps together could lengthen a text more than MAX_GROWTH times. Forty chained
    doublings would fill any memory."""
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(backend, name)
        growth, count = 1.0, 0
        for step in _steps(json.loads(part.__getstate__())) if part is not None else ():
            growth, count = growth * _factor(step), count + 1
            if growth > MAX_GROWTH or count > MAX_STEPS:
                raise ValueError(
                    f"its {name} could lengthen a text more than {MAX_GROWTH:g} times (or has more than "
                    f"{MAX_STEPS} steps)"
                )


def _steps(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    inner = next((part[key] for key in ("normalizers", "pretokenizers", "processors", "decoders") if key in part), None)
    if inner is None:
        yield part
    for step in inner or ():
        yield from _steps(step)


def _factor(step: dict[str, Any]) -> float:
    """Return an upper bound: characters out per character in, and for a template ids out per id in."""
    kind = step.get("type")
    if kind == "Replace":
        pattern = step.get("pattern", {})
        length = len(step.get("content", ""))
        if "String" in pattern and pattern["String"]:
            return max(1.0, length / len(pattern["String"]))
        return max(1.0, length + _matches_nothing(pattern.get("Regex", "")))
    if kind == "TemplateProcessing":
        return max(1.0, float(sum("Sequence" in piece for piece in step.get("single", ()))))
    return 1.0


def _matches_nothing(pattern: str) -> bool:
    """True if the pattern matches the empty string, as far as Python can tell."""
    try:
        return re.compile(pattern).match("") is not None
    except re.error:
        return "+" not in pattern and "{" not in pattern


TURN_ENDS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<|end_of_turn|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|return|>",
        "<turn|>",
        "[EOT]",
        "<EOT>",
        "<end_of_utterance>",
    }
)
REMEDY = "download the model again, or pass skip_tokenizer_init=True and prompts as token ids"


@dataclass(frozen=True)
class Vocabulary:
    backend: Backend
    origin: str  # the file or folder, for messages
    num_ids: int | None = None  # ids are below this; None: the backend's
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    named: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, … as templates call them
    templates: Mapping[str, str] = field(default_factory=dict)  # chat templates; the main one is "default"
    affixes: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # ids around a prompt; None: the backend's own
    aliases: Mapping[int, int] = field(default_factory=dict)  # id → another id of equal text
    matcher: GreedyMatcher | None = None  # encodes texts between added tokens, where the library cannot
    infill: Mapping[str, int] = field(default_factory=dict)  # FIM ids that a file names: pre, suf …

    def with_template(self, template: str) -> Vocabulary:
        """Replace all chat templates; end-of-turn tokens that it writes end answers too."""
        ends = [
            id
            for id, token in self.backend.get_added_tokens_decoder().items()
            if token.special and token.content in TURN_ENDS and token.content in template
        ]
        return replace(
            self, templates={"default": template}, eos_token_ids=tuple(dict.fromkeys([*self.eos_token_ids, *ends]))
        )


@contextmanager
def refuse_damage(origin: str) -> Iterator[None]:
    """Turn any failure into InvalidModel. The library's panics are not Exceptions, so everything is caught."""
    try:
        yield
    except (PenstockError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidModel(f"{origin}: the tokenizer is damaged or not supported ({reason}); {REMEDY}") from error


def add_tokens(backend: Backend, special: list[str], plain: list[str], rstrip: frozenset[str] = frozenset()) -> None:
    """Make tokens of the vocabulary match raw text before any splitting."""

    def token(text: str, is_special: bool) -> AddedToken:
        return AddedToken(text, special=is_special, normalized=False, rstrip=text in rstrip)

    backend.add_special_tokens([token(text, True) for text in special if text])
    backend.add_tokens([token(text, False) for text in plain if text])
