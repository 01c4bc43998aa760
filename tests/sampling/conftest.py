"""Rows as the runner makes them at admission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.hub import list_models
from penstock.models.files.gguf import GgufFile
from penstock.sampling import RowState
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.sandbox.lexicon import make_lexicon
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import BeamSearchParams, Request, SamplingParams

PROMPT = (1, 2, 3)


def _make_row(
    *,
    prompt: Sequence[int] = PROMPT,
    generated: Sequence[int] = (),
    sibling: int = 0,
    seed: int = 7,
    eos: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    beam: BeamSearchParams | None = None,
    grammars: GrammarCompiler | None = None,
    dry_breakers: bytes = b"",
    mu: float | None = None,
    **sampling: Any,
) -> RowState:
    params = SamplingParams(**sampling)
    request = Request(
        id="r",
        tokens=tuple(prompt),
        sampling=params,
        seed=seed,
        eos_token_ids=tuple(eos),
        bad_words=tuple(tuple(word) for word in bad_words),
        beam=beam,
        max_tokens=params.max_tokens or 16,
        dry_breakers=dry_breakers,
    )
    return RowState(request, sibling, [*prompt, *generated], len(prompt), grammars, mu)


@pytest.fixture(scope="session")
def make_row() -> Callable[..., RowState]:
    return _make_row


def _read_tokenizer(name: str, file_name: str) -> Tokenizer:
    path = {model.path.name: model.path for model in list_models()}.get(file_name)
    if path is None:
        pytest.skip(f"{name} is not on this machine; penstock pull {name} fetches it")
    file = GgufFile(path)
    metadata = dict(file.metadata)
    file.close()
    return Tokenizer.from_gguf(metadata, path.name)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """SmolLM2's: 49,152 ids, byte-level BPE."""
    return _read_tokenizer("smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def pieces() -> Tokenizer:
    """Gemma 3's: 262,144 ids, SentencePiece with byte fallback."""
    return _read_tokenizer("gemma3-270m", "gemma-3-270m-q4_k_m.gguf")


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: make_lexicon(tokenizer))
