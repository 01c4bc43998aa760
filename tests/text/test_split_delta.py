"""A delta of several tokens is told token by token, as if each had come in a step of its own."""

from __future__ import annotations

from penstock.text.answers import Collector, split_delta
from penstock.types import Delta, Logprob, Request, SamplingParams, StreamDelta

WHOLE = Delta(
    "r",
    1,
    (5, 6, 7),
    ({5: Logprob(-1.0, 1)}, {6: Logprob(-2.0, 1)}, {7: Logprob(-3.0, 2)}),
    (None,),
    finish_reason="stop",
    stop_reason=7,
    num_cached_tokens=4,
    mu=1.5,
)


def test_parts_are_the_whole() -> None:
    parts = list(split_delta(WHOLE))
    assert [part.tokens for part in parts] == [(5,), (6,), (7,)]
    assert sum((part.logprobs for part in parts), ()) == WHOLE.logprobs
    assert [part.prompt_logprobs for part in parts] == [(None,), None, None]
    assert [part.finish_reason for part in parts] == [None, None, "stop"] and parts[-1].stop_reason == 7
    assert [part.mu for part in parts] == [None, None, 1.5] and all(part.num_cached_tokens == 4 for part in parts)


def test_a_listener_hears_each_token() -> None:
    heard: list[StreamDelta] = []
    collector = Collector(Request(id="r", tokens=(1,), sampling=SamplingParams(n=2, detokenize=False)), None, None)
    collector.listener = heard.append
    assert not collector.push(WHOLE)
    assert [one.token_ids for one in heard] == [(5,), (6,), (7,)]
    assert [one.finish_reason for one in heard] == [None, None, "stop"]
    collector.listener = None
    collector.push(Delta("r", 0, (8, 9)))
    assert len(heard) == 3 and collector.output().outputs[0].token_ids == [8, 9]
