"""Perplexity: which token is scored in which window, and that the scores are those of transformers' logits."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from penstock import LLM
from penstock.api.perplexity import Score, perplexity, tokens_before, windows
from penstock.errors import InvalidRequest, PenstockError
from tests.llm import tiny
from tests.models import oracle

TEXT = " ".join(tiny.CORPUS[:4]) + " Ärger über Öl: naïve café, 42 × 7."


@given(num_tokens=st.integers(2, 300), window=st.integers(2, 90), num_before=st.integers(0, 2), data=st.data())
def test_each_token_is_scored_once(num_tokens: int, window: int, num_before: int, data: st.DataObject) -> None:
    window += num_before
    stride = data.draw(st.integers(1, window - max(1, num_before)))
    scored: list[int] = []
    for index, place in enumerate(windows(num_tokens, window, stride, num_before)):
        assert 0 <= place.begin <= place.first < place.end
        assert num_before + place.end - place.begin <= window
        scored += range(place.first, place.end)
        if index:
            assert place.end - place.first <= stride
            assert num_before + place.first - place.begin == window - stride
        else:
            assert place.begin == 0 and place.end == min(num_tokens, window - num_before)
    assert scored == list(range(0 if num_before else 1, num_tokens))


def expected(theirs: Any, before: list[int], tokens: list[int], window: int, stride: int) -> list[float]:
    """The losses, token by token: each from the first window that reaches it."""
    losses = []
    room = window - len(before)
    for at in range(0 if before else 1, len(tokens)):
        begin = 0 if at < room else (1 + (at - room) // stride) * stride
        rows = oracle.logits(theirs, before + tokens[begin:at]).log_softmax(-1)
        losses.append(-float(rows[-1, tokens[at]]))
    return losses


def check(score: Score, losses: list[float]) -> None:
    assert score.losses == pytest.approx(losses, abs=2e-4)
    mean = statistics.mean(losses)
    assert score.nats_per_token == pytest.approx(mean, abs=1e-4)
    assert score.perplexity == pytest.approx(math.exp(mean), rel=1e-4)
    error = math.exp(mean) * statistics.stdev(losses) / len(losses) ** 0.5
    assert score.standard_error == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize(("window", "stride"), [(256, 128), (24, 12), (24, 7), (24, 23), (2, 1)])
def test_scores_are_those_of_the_logits(real: LLM, theirs: Any, window: int, stride: int) -> None:
    """A window as long as the longest sequence among them."""
    assert real.tokenizer is not None
    tokens = real.tokenizer.encode(TEXT)
    score = perplexity(real, TEXT, window=window, stride=stride)
    assert (score.window, score.stride) == (window, stride) and len(tokens) > 90
    check(score, expected(theirs, [], tokens, window, stride))
    scored = TEXT.encode()[len(real.tokenizer.decode(tokens[:1]).encode()) :]
    assert score.bits_per_byte == pytest.approx(sum(score.losses) / math.log(2) / len(scored))


def test_the_default_window_and_stride(real: LLM) -> None:
    score = perplexity(real, TEXT)
    assert (score.window, score.stride) == (256, 128)
    with tiny.dummy(real.model, skip_tokenizer_init=False, max_model_len=100) as short:
        assert [getattr(perplexity(short, TEXT), name) for name in ("window", "stride")] == [100, 50]
        assert perplexity(short, TEXT, stride=30).window == 100


def test_the_first_tokens_only(real: LLM) -> None:
    assert real.tokenizer is not None
    whole, part = perplexity(real, TEXT, window=256), perplexity(real, TEXT, window=256, max_tokens=20)
    tokens = real.tokenizer.encode(TEXT)
    assert part.losses == whole.losses[:19]
    spelt = [len(real.tokenizer.decode(tokens[:count]).encode()) for count in (1, 20)]
    assert part.num_bytes == spelt[1] - spelt[0]


def test_a_beginning_token_is_in_every_window(checkpoint: tuple[str, Any], tmp_path: Path) -> None:
    """It is scored nowhere, and with it the text's first token is."""
    folder, theirs = checkpoint
    made = Tokenizer.from_str(tiny.tokenizer().to_str())
    begin = made.token_to_id(tiny.EOS)
    assert begin is not None
    made.post_processor = processors.TemplateProcessing(single=f"{tiny.EOS} $A", special_tokens=[(tiny.EOS, begin)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": tiny.EOS}))
    (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())
    exact = {"kv_cache_dtype": "float32", "kv_cache_tokens": 1024, "threads": 1}
    with LLM(folder, tokenizer=str(tmp_path), progress=False, **exact) as llm:
        assert llm.tokenizer is not None and tokens_before(llm.tokenizer) == [begin]
        tokens = llm.tokenizer.encode(TEXT, add_special_tokens=False)
        for window, stride in ((24, 12), (24, 23)):
            score = perplexity(llm, TEXT, window=window, stride=stride)
            assert len(score.losses) == len(tokens) and score.num_bytes == len(TEXT.encode())
            check(score, expected(theirs, [begin], tokens, window, stride))


def test_a_model_that_knows_nothing(tmp_path: Path) -> None:
    """Weights near zero give every token the same probability: the perplexity is the size of the vocabulary."""
    folder = tiny.write_config(tmp_path, vocab_size=300, initializer_range=1e-6)
    tiny.write_tokenizer(tmp_path)
    with tiny.dummy(folder, skip_tokenizer_init=False) as llm:
        score = perplexity(llm, TEXT)
    assert score.perplexity == pytest.approx(300, rel=1e-3) and score.standard_error < 0.3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(window=1), "window=1 is out of range"),
        (dict(stride=0), "stride=0 is out of range"),
        (dict(max_tokens=0), "max_tokens=0 is out of range"),
        (dict(window=16, stride=16), "stride=16 leaves no context in a window of 16"),
        (dict(stride=256), "stride=256 leaves no context in a window of 256: set a stride of at most 255"),
        (dict(window=257), "window=257 exceeds the context length of 256"),
        (dict(max_tokens=2), "the text has 2 tokens to score"),
    ],
)
def test_what_cannot_be_scored(real: LLM, options: dict[str, int], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        perplexity(real, TEXT, **options)  # type: ignore[arg-type]


def test_without_a_tokenizer(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="needs a tokenizer"):
        perplexity(llm, TEXT)


def test_a_damaged_model(text_llm: LLM) -> None:
    def damage(step: Any) -> None:
        raise ArithmeticError("no more numbers")

    with tiny.before_forward(text_llm.service, damage), pytest.raises(PenstockError, match="no more numbers"):
        perplexity(text_llm, TEXT)
