from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.text.tokenizers.sentencepiece import merges_of

PIECES = st.dictionaries(st.text("ab▁", min_size=1, max_size=6), st.sampled_from([0.0, -0.0, -1.0, -1.5, -2.0, -7.0]))


@given(PIECES)
def test_merges_come_by_score_then_by_the_longer_left_half(scored: dict[str, float]) -> None:
    cuts = [
        (-score, -cut, index, piece[:cut], piece[cut:])
        for index, (piece, score) in enumerate(scored.items())
        for cut in range(1, len(piece))
        if piece[:cut] in scored and piece[cut:] in scored
    ]
    assert merges_of(list(scored), list(scored.values()), "x") == [(left, right) for *_, left, right in sorted(cuts)]
