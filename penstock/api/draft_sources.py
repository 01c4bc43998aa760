"""Sources of drafts beside the method's own: a function of the user's, a text of the operator's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.config import EngineConfig, Resolved
from penstock.config.speculation import parse_speculation
from penstock.draft.corpus import CorpusDrafter
from penstock.draft.drafter import Drafter
from penstock.draft.function import DraftFunction, FunctionDrafter
from penstock.errors import InvalidConfig, quote
from penstock.host.files import UnreadableFile, read_regular
from penstock.text.tokenizers.tokenizer import Tokenizer

OPTION = "speculative_config: corpus"
MAX_CORPUS_BYTES = 4 << 20  # about a million tokens; the index takes about 150 bytes for each
PIECE_CHARS = 1 << 16  # that are encoded at once


@dataclass(frozen=True)
class DraftSources:
    function: DraftFunction | None = None
    corpus: str | None = None  # the text itself

    def require_drafts(self, settings: Resolved) -> None:
        """Refuse a function that would never be called."""
        if self.function is not None and parse_speculation(settings.speculative_config) is None:
            why = next(one.why for one in settings.settings if one.name == "speculative_config")
            raise InvalidConfig(
                f"draft_fn is never called with speculative_config=off ({why}): leave draft_fn out, or set "
                'speculative_config={"method": "auto"}'
            )

    def make(self, vocab_size: int, load_tokenizer: Callable[[], Tokenizer]) -> list[Drafter]:
        made: list[Drafter] = []
        if self.function is not None:
            made.append(FunctionDrafter(self.function, vocab_size))
        if self.corpus is not None:
            tokenizer = load_tokenizer()
            made.append(CorpusDrafter(encode_corpus(self.corpus, tokenizer)))
            tokenizer.rest()
        return made


def read_sources(config: EngineConfig, function: DraftFunction | None) -> DraftSources:
    """Read what the options name, before anything is loaded."""
    if function is not None and not callable(function):
        raise InvalidConfig(
            f"draft_fn={quote(function)} is not callable: give a function from token ids so far to draft token ids"
        )
    speculation = parse_speculation(config.speculative_config)
    if speculation is None or speculation.corpus is None:
        return DraftSources(function)
    if config.skip_tokenizer_init:
        raise InvalidConfig(f"{OPTION}={quote(speculation.corpus)} needs a tokenizer: do not set skip_tokenizer_init")
    return DraftSources(function, read_corpus(speculation.corpus))


def read_corpus(name: str) -> str:
    """Return the text of a file; refuse one that is missing, too large, empty or no text."""
    try:
        text = read_regular(Path(name).expanduser(), MAX_CORPUS_BYTES).decode()
    except UnreadableFile as error:
        raise InvalidConfig(
            f"{OPTION}={quote(name)} cannot be read: {error.reason}; give a text file of at most "
            f"{MAX_CORPUS_BYTES >> 20} MiB, or leave it out"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{OPTION}={quote(name)} is not UTF-8 text: {error}; convert it, or leave it out") from None
    if not text.strip():
        raise InvalidConfig(f"{OPTION}={quote(name)} is empty: give a file with text, or leave it out")
    return text


def encode_corpus(text: str, tokenizer: Tokenizer) -> list[int]:
    return [id for piece in _cut(text) for id in tokenizer.encode(piece, add_special_tokens=False)]


def _cut(text: str) -> Iterator[str]:
    """Yield pieces that end with a line where there is one: tokenizers seldom join over its end."""
    at = 0
    while at < len(text):
        end = len(text) if at + PIECE_CHARS >= len(text) else text.rfind("\n", at, at + PIECE_CHARS) + 1
        end = end if end > at else at + PIECE_CHARS
        yield text[at:end]
        at = end
