"""Sampled ids to text, as they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.text.tokenizer import Tokenizer


class Detokenizer:
    """Deltas that never end in half a character and whose sum, with `finish()`, is the decode of all ids.

    The text is what the ids add to the prompt: after a prompt a SentencePiece word keeps its leading space, and bytes
    that the prompt left incomplete are completed here. Each id costs the same, however long the text already is.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream = tokenizer.spelling.stream()
        self._stream.push(tokenizer.spelling.tail(prompt_ids, self._hidden))

    def push(self, ids: Iterable[int]) -> str:
        return self._stream.push([id for id in ids if id not in self._hidden])

    def finish(self) -> str:
        """What remains once no more ids will come: U+FFFD for a character left incomplete."""
        return self._stream.finish()
