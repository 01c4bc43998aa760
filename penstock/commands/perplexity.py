"""`penstock perplexity`: measure how well a model predicts a text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.commands.flags.options import Json, Model, engine_options, open_llm
from penstock.commands.output import Table, write_text
from penstock.errors import InvalidRequest
from penstock.host.files import MIB, UnreadableFile, read_regular

if TYPE_CHECKING:
    from penstock.api.perplexity import Score

File = Annotated[Path, typer.Argument(metavar="FILE", hidden=True)]
WindowSize = Annotated[
    int | None, typer.Option("--window", help="Context window in tokens. [default: the model's, up to 1024]")
]
Stride = Annotated[
    int | None,
    typer.Option(
        "--stride", help="Tokens from one window to the next; each scores its last STRIDE. [default: half the window]"
    ),
]
MAX_TEXT_BYTES = 1024 * MIB
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Use only the first tokens of the file.")]


@engine_options("skip_tokenizer_init")
def perplexity(
    model: Model,
    file: File,
    window: WindowSize = None,
    stride: Stride = None,
    max_tokens: MaxTokens = None,
    as_json: Json = False,
    *,
    options: dict[str, Any],
) -> None:
    """Measure how well a model predicts a text.

    FILE is UTF-8 text. Each token is scored once, with at least window - stride tokens before it, except in the first
    window. The standard error is that of the mean over tokens, taken as independent.
    """
    from penstock.api.perplexity import check_counts
    from penstock.api.perplexity import perplexity as score_of

    check_counts(window, stride, max_tokens)
    text = read_text(file)
    with open_llm(model, options) as llm:
        score = score_of(llm, text, window=window, stride=stride, max_tokens=max_tokens, progress=sys.stderr.isatty())
    facts = {"model": model, "file": str(file), **_figures(score)}
    write_text(json.dumps(facts) + "\n" if as_json else _lines(score))


def read_text(file: Path) -> str:
    try:
        return read_regular(file, MAX_TEXT_BYTES).decode()
    except UnreadableFile as error:
        raise InvalidRequest(f"{file} cannot be read ({error.reason}): give a text file") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{file} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#x}; "
            "convert it, for example with iconv"
        ) from error


def _figures(score: Score) -> dict[str, Any]:
    return {
        "num_tokens": len(score.losses),
        "num_bytes": score.num_bytes,
        "window": score.window,
        "stride": score.stride,
        "perplexity": score.perplexity,
        "standard_error": score.standard_error,
        "nats_per_token": score.nats_per_token,
        "bits_per_byte": score.bits_per_byte,
        "seconds": round(score.seconds, 3),
    }


def _lines(score: Score) -> str:
    rows = {
        "perplexity": f"{score.perplexity:.4f} ± {score.standard_error:.4f}",
        "nats/token": f"{score.nats_per_token:.5f}",
        "bits/byte": f"{score.bits_per_byte:.5f}",
        "scored": f"{len(score.losses)} tokens, {score.num_bytes} bytes",
        "window": f"{score.window} tokens, stride {score.stride}",
        "time": f"{score.seconds:.1f} s, {len(score.losses) / score.seconds:.0f} tokens/s",
    }
    table = Table()
    for row in rows.items():
        table.add(*row)
    return table.plain()
