"""Drafts from a function of the user's: tokens so far in, tokens that may follow out.

It runs in a thread of its own, on a copy of the tokens, so that nothing it does can reach an answer. One that raises,
hangs or returns no token ids is switched off for good, with one message in the log.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from operator import index
from typing import Any

from penstock.draft.drafter import Proposal
from penstock.sampling.row import RowState

_log = logging.getLogger(__name__)
MAX_CALL_S = 1.0
PRIOR = 0.5
DraftFunction = Callable[[list[int]], Sequence[int] | None]
Asked = queue.SimpleQueue[tuple[list[int], int] | None]  # tokens so far, and how many may come back
Answers = queue.SimpleQueue[list[int] | str]  # draft tokens, or why there are none


class FunctionCaller:
    """Calls the function with a deadline, one call at a time. `failure` is why it is no longer called."""

    def __init__(self, function: DraftFunction, vocab_size: int, max_call_s: float = MAX_CALL_S) -> None:
        self._max_call_s = max_call_s
        self._asked: Asked = queue.SimpleQueue()
        self._answers: Answers = queue.SimpleQueue()
        self.failure: str | None = None
        work = (function, vocab_size, self._asked, self._answers)
        self._thread = threading.Thread(target=_serve, args=work, name="penstock-draft-fn", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._asked.put, None)  # the thread does not hold the caller

    def call(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens; none once the function has failed."""
        if self.failure is not None:
            return []
        self._asked.put((list(tokens), most))
        try:
            answer = self._answers.get(timeout=self._max_call_s)
        except queue.Empty:
            answer = f"took longer than {self._max_call_s:g} s: return sooner, or an empty list"
        if isinstance(answer, list):
            return answer
        self.failure = answer
        self._end()
        _log.warning("draft_fn is switched off: it %s", answer)
        return []


def _serve(function: DraftFunction, vocab_size: int, asked: Asked, answers: Answers) -> None:
    while (task := asked.get()) is not None:
        tokens, most = task
        try:
            answers.put(_read_ids(function(tokens), most, vocab_size))
        except BaseException as error:
            answers.put(f"raised {type(error).__name__}: {error}")


def _read_ids(answer: Any, most: int, vocab_size: int) -> list[int] | str:
    """Return the first `most` token ids, or what is wrong with them."""
    if answer is None:
        return []
    try:
        given = list(answer[:most])
        ids = [index(token) for token in given]
    except Exception:
        return f"returned {type(answer).__name__}: return a list of token ids"
    wrong = next((id for id, token in zip(ids, given) if isinstance(token, bool) or not 0 <= id < vocab_size), None)
    return ids if wrong is None else f"returned {given[ids.index(wrong)]!r}: token ids are 0 to {vocab_size - 1}"


class FunctionFollower:
    def __init__(self, caller: FunctionCaller, state: RowState) -> None:
        self._caller, self._state = caller, state

    def append(self, tokens: Sequence[int]) -> None:
        pass  # the row's state has them

    def propose(self, most: int) -> Proposal | None:
        tokens = self._caller.call(self._state.tokens, most)
        return Proposal(tokens, 0, PRIOR) if tokens else None


class FunctionDrafter:
    name = "function"

    def __init__(self, function: DraftFunction, vocab_size: int) -> None:
        self._caller = FunctionCaller(function, vocab_size)

    def start(self, state: RowState) -> FunctionFollower | None:
        return FunctionFollower(self._caller, state) if self._caller.failure is None else None

    def finish(self, state: RowState) -> None:
        pass
