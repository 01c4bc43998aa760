"""Build a lexicon, the vocabulary as grammars see it, from a tokenizer. Needs neither torch nor msgspec."""

from __future__ import annotations

from functools import partial

from penstock.sampling.grammar.lexicon import Lexicon
from penstock.text.tokenizers.tokenizer import Tokenizer


def make_lexicon(tokenizer: Tokenizer) -> Lexicon:
    return Lexicon(
        tokenizer.spellings(),
        {id: tokenizer.token_text(id).encode() for id in tokenizer.special_ids},
        partial(tokenizer.encode, add_special_tokens=False),
    )
