"""Flags of sampling and of the answer's form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.commands.flags.command import RARE_SAMPLING, SAMPLING, STRUCTURE
from penstock.commands.flags.options import Run, add_flags
from penstock.errors import InvalidRequest, quote
from penstock.host.files import UnreadableFile, read_regular

# name → type, help; the names are those of SamplingParams
COMMON: dict[str, tuple[Any, str]] = {
    "temperature": (float, "0 is greedy. [default of these four: the model's]"),
    "top_p": (float, "Keep the likeliest tokens that sum to this share."),
    "top_k": (int, "Keep this many of the likeliest tokens; 0 is off."),
    "min_p": (float, "Keep tokens this likely, relative to the likeliest."),
    "repetition_penalty": (float, "Over 1: tokens seen so far become less likely."),
    "presence_penalty": (float, "Over 0: tokens of the answer become less likely."),
    "frequency_penalty": (float, "Over 0: the same, by how often they came."),
    "seed": (int, "Seed of sampling. [default: random]"),
    "stop": (list[str], "Text that ends the answer; repeatable."),
}
RARE: dict[str, tuple[Any, str]] = {
    "min_tokens": (int, "Tokens before the answer may end."),
    "ignore_eos": (bool, "Go on after the end-of-sequence token."),
    "bad_words": (list[str], "Text that must not occur; repeatable."),
    "thinking_token_budget": (int, "Tokens of reasoning before it is closed."),
    "typical_p": (float, "Sample from tokens of about the expected surprise; 1 is off."),
    "repeat_last_n": (int, "Tokens that penalties look back on; -1 is all."),
    "dry_multiplier": (float, "Penalize tokens that prolong a repetition (DRY); 0 is off."),
    "dry_base": (float, "Growth of DRY's penalty per repeated token."),
    "dry_allowed_length": (int, "Length of repetitions that DRY allows."),
    "dry_penalty_last_n": (int, "Tokens that DRY looks back on; -1 is all."),
    "xtc_probability": (float, "Chance to leave out the likeliest tokens (XTC); 0 is off."),
    "xtc_threshold": (float, "Probability of tokens that XTC may leave out."),
    "top_n_sigma": (float, "Leave out logits this many deviations under the greatest; 0 is off."),
    "dynatemp_range": (float, "Vary the temperature by this much with the entropy; 0 is off."),
    "dynatemp_exponent": (float, "Exponent of the entropy."),
    "mirostat": (int, "Version of Mirostat: 0 (off), 1 or 2."),
    "mirostat_tau": (float, "Mirostat's surprise to aim for."),
    "mirostat_eta": (float, "Mirostat's learning rate."),
}
FORMS: dict[str, tuple[Any, str, str | None]] = {
    "json_schema": (str, "JSON schema of the answer, a file or the text itself.", "FILE"),
    "json_object": (bool, "Answer with any JSON object.", None),
    "regex": (str, "Regular expression of the whole answer.", "REGEX"),
    "grammar": (str, "Lark or GBNF grammar of the answer, a file or the text.", "FILE"),
    "choice": (list[str], "One of the texts to answer with; repeatable.", "TEXT"),
}
MAX_FORM_BYTES = 1 << 19


def sampling_options(function: Run) -> Run:
    """Add the flags. The command gets those the user set as `sampling: dict[str, Any]`, by SamplingParams' names."""
    return add_flags(_flags(), "sampling", read_sampling)(function)


def _flags() -> list[inspect.Parameter]:
    found = []
    for group, table in ((SAMPLING, COMMON), (STRUCTURE, FORMS), (RARE_SAMPLING, RARE)):
        for name, (kind, text, *metavar) in table.items():
            declared = typer.Option(
                f"--{name.replace('_', '-')}",
                help=text,
                show_default=False,
                rich_help_panel=group,
                metavar=metavar[0] if metavar else "TEXT" if kind == list[str] else None,
            )
            annotation: Any = Annotated[kind | None, declared]
            found.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return found


def read_sampling(given: dict[str, Any]) -> dict[str, Any]:
    """Make sampling parameters of flags; refuse bad ones before any model is loaded."""
    from penstock.types import SamplingParams, StructuredOutputsParams

    values = {name: value for name, value in given.items() if name not in FORMS and value != ()}
    forms = {name: value for name, value in given.items() if name in FORMS and value not in ((), False)}
    if len(forms) > 1:
        named = " and ".join(f"--{name.replace('_', '-')}" for name in forms)
        raise InvalidRequest(f"{named} exclude each other: an answer has one form")
    for name, value in forms.items():
        key, text = FORM_READERS.get(name, (name, _same))
        values["structured_outputs"] = StructuredOutputsParams(**{key: text(value)})
    SamplingParams(**{"max_tokens": None, **values})
    return values


def limit_tokens(values: dict[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """Return sampling parameters with a limit, if the user set one."""
    from penstock.types import SamplingParams

    if max_tokens is None:
        return values
    SamplingParams(**{**values, "max_tokens": max_tokens})
    return {**values, "max_tokens": max_tokens}


def read_schema(text: str) -> str:
    """Return the schema in a file, or the given text if it is one."""
    is_text = text.lstrip().startswith("{") or text.strip() in ("true", "false")
    return text if is_text else _read(text, "json_schema", "give a file, or the schema itself")


def read_grammar(text: str) -> str:
    """Return the grammar in a file, or the given text if it is one."""
    is_text = "::=" in text or "\n" in text or text.lstrip().startswith("start:")
    return text if is_text else _read(text, "grammar", "give a file, or the grammar itself")


def _read(path: str, name: str, remedy: str) -> str:
    try:
        return read_regular(Path(path).expanduser(), MAX_FORM_BYTES).decode()
    except UnreadableFile as error:
        raise InvalidRequest(f"{name}={quote(path)} cannot be read: {error.reason}; {remedy}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name}={quote(path)} is not UTF-8 text: {error}; convert it with iconv") from None


def _same(value: Any) -> Any:
    return value


FORM_READERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "json_schema": ("json", read_schema),
    "grammar": ("grammar", read_grammar),
}
