"""`penstock chat`: a conversation at the terminal."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from penstock.commands.chat.conversation import ChatMemory
from penstock.commands.flags.options import ModelOrDefault, System, engine_options
from penstock.commands.flags.sampling import limit_tokens, sampling_options
from penstock.commands.prompt import read_word
from penstock.hub.names import DEFAULT_MODEL

MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="Maximum tokens of each answer. [default: as many as fit]")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print figures after every answer.")]
RenderMarkdown = Annotated[
    bool, typer.Option("--markdown/--no-markdown", help="Render Markdown at a terminal.", show_default=False)
]


@engine_options("seed", "skip_tokenizer_init")
@sampling_options
def chat(
    model: ModelOrDefault = DEFAULT_MODEL,
    system: System = None,
    max_tokens: MaxTokens = None,
    verbose: Verbose = False,
    markdown: RenderMarkdown = True,
    *,
    sampling: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Chat with a model; /help lists the commands."""
    system = read_word(system, "the system message") if system else None
    converse(model, system, limit_tokens(sampling, max_tokens), options, verbose, markdown)


def converse(
    model: str,
    system: str | None,
    values: dict[str, Any],
    options: dict[str, Any],
    verbose: bool = False,
    markdown: bool = True,
) -> None:
    from penstock.commands.chat.partner import Partner
    from penstock.commands.chat.session import Session

    partner = Partner(model, options)
    try:
        Session(partner, ChatMemory(system), values, verbose, renders=markdown and _can_render()).loop(_keyboard())
    finally:
        partner.close()


def _is_capable() -> bool:
    """True at a terminal that can move its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _keyboard() -> Any:
    if not _is_capable():
        from penstock.commands.chat.keyboard import LineKeyboard

        return LineKeyboard()
    from penstock.commands.chat.line_editor import LineEditor
    from penstock.commands.chat.slash import SlashWords

    return LineEditor(SlashWords(_model_names))


def _can_render() -> bool:
    if not _is_capable():
        return False
    from penstock.commands.chat.markdown_stream import can_render

    return can_render()


def _model_names() -> list[str]:
    from penstock.hub import list_models

    return [model.name for model in list_models()]
