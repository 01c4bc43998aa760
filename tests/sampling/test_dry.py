"""DRY against its definition, written out place by place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidRequest
from penstock.sampling import RowState
from penstock.text.tokenizers.tokenizer import Tokenizer, TokenSearch
from penstock.types import MAX_DRY_LENGTH, SamplingParams

V = 6
TEXT = st.lists(st.integers(0, V - 1), max_size=40)


def _bits(ids: set[int]) -> bytes:
    flags = np.zeros(V, dtype=bool)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").tobytes()


def _naive(text: list[int], breakers: set[int], sampling: SamplingParams) -> dict[int, int]:
    """Token → length of the longest repetition that it would go on with."""
    if sampling.dry_penalty_last_n >= 0:
        text = text[len(text) - min(len(text), sampling.dry_penalty_last_n) :]
    found: dict[int, int] = {}
    for place in range(1, len(text)):
        length = 0
        while length < place and text[place - 1 - length] == text[-1 - length] and text[-1 - length] not in breakers:
            length += 1
        token = text[place]
        if length >= sampling.dry_allowed_length and token not in breakers:
            found[token] = max(found.get(token, 0), min(length, MAX_DRY_LENGTH))
    reach = next((i for i, token in enumerate(reversed(text)) if token in breakers), len(text))
    return found if len(text) > sampling.dry_allowed_length and reach >= sampling.dry_allowed_length else {}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    prompt=TEXT,
    generated=TEXT,
    allowed=st.integers(0, 4),
    last_n=st.sampled_from([-1, 0, 5, 17]),
    breakers=st.sets(st.integers(0, V - 1), max_size=2),
    base=st.sampled_from([1.0, 1.75, 3.0]),
)
def test_against_the_definition(
    make_row: Callable[..., RowState],
    prompt: list[int],
    generated: list[int],
    allowed: int,
    last_n: int,
    breakers: set[int],
    base: float,
) -> None:
    sampling: dict[str, Any] = {
        "dry_multiplier": 0.8,
        "dry_base": base,
        "dry_allowed_length": allowed,
        "dry_penalty_last_n": last_n,
    }
    row = make_row(prompt=prompt, dry_breakers=_bits(breakers), **sampling)
    logits = np.zeros(V, dtype=np.float32)
    row.edit(logits)
    for token in generated:
        row.append(token)
        row.append(token)
        row.truncate(len(row.tokens) - 1)
        row.edit(logits)
    expected = np.zeros(V)
    params = SamplingParams(**sampling)
    if params.has_dry:
        for token, length in _naive(prompt + generated, breakers, params).items():
            expected[token] = -0.8 * base ** (length - allowed)
    assert np.allclose(row.edit(logits), expected, rtol=1e-6)
    fresh = make_row(prompt=prompt, generated=generated, dry_breakers=_bits(breakers), **sampling)
    assert fresh.edit(logits).tobytes() == row.edit(logits).tobytes()


def test_long_repetitions_stay_numbers(make_row: Callable[..., RowState]) -> None:
    """Breaks when a power overflows, or when a long text of one token takes time in proportion to its square."""
    row = make_row(prompt=[1] * 30_000, dry_multiplier=1e6, dry_base=1e6)
    logits = np.zeros(V, dtype=np.float32)
    for _ in range(200):
        assert np.isfinite(row.edit(logits)).all() and row.edit(logits)[1] < -1e30
        row.append(1)


def test_a_forbidden_token_stays_forbidden(make_row: Callable[..., RowState]) -> None:
    row = make_row(prompt=[1, 2, 3, 1, 2], dry_multiplier=5.0, allowed_token_ids=[3, 4])
    edited = row.edit(np.zeros(V, dtype=np.float32))
    assert edited[4] == 0 and edited[3] == -5 and edited[0] == -np.inf


def test_breakers_are_found_in_what_ids_spell() -> None:
    search = TokenSearch([b"a", ":", b"", "b:c", b"\xff", b"\n\n", "ünï"])
    bits = np.unpackbits(np.frombuffer(search.find([":", "\n", "ü"]), dtype=np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [1, 3, 5, 6]
    assert search.find(["zz"]) == search.find([]) == b"\x00"


def test_breakers_of_a_real_vocabulary(tokenizer: Tokenizer) -> None:
    breakers = SamplingParams().dry_sequence_breakers or ()
    bits = np.frombuffer(tokenizer.find_ids(breakers), dtype=np.uint8)
    found = set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())
    texts = {id: tokenizer.token_text(id) for id in range(0, tokenizer.vocab_size)}
    assert found == {id for id, text in texts.items() if any(one in text for one in breakers)} and len(found) > 100


@pytest.mark.parametrize(
    "values",
    [
        {"dry_base": 0.9},
        {"dry_multiplier": -1},
        {"dry_penalty_last_n": -2},
        {"dry_sequence_breakers": ["x" * 41]},
        {"dry_sequence_breakers": ["x"] * 65},
        {"dry_allowed_length": 1.5},
    ],
)
def test_values_out_of_range(values: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(values))):
        SamplingParams(**values)  # type: ignore[arg-type]
