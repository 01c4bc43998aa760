"""What a lane answers where a text program fails in a way that nobody foresaw."""

from __future__ import annotations

from typing import Any

from penstock.sandbox.jobs import EncodeText, Refusal
from penstock.sandbox.lane import _reply


class Failing:
    def encode_upto(self, *arguments: Any) -> list[int]:
        raise OverflowError("too large")


def test_an_unforeseen_error_is_a_refusal_that_names_it() -> None:
    program: Any = Failing()
    reply = _reply(program, None, EncodeText("a", True, 8))
    assert isinstance(reply, Refusal) and reply.kind == "request" and "OverflowError" in reply.message
