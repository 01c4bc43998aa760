"""Control messages to an engine and its successors, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import count
from typing import Any

from penstock.engine.messages import Answer, Answered, Control
from penstock.errors import EngineFailed, PenstockError

MAX_TRIES = 2  # of a message whose engines die before they answer


class Controls:
    """Sends messages while an engine is up; one that it does not live to answer goes to the next."""

    def __init__(self, send: Callable[[Control], None]) -> None:
        self._send = send
        self._numbers = count(1)
        self._asked: dict[str, asyncio.Future[Answer | None]] = {}
        self._opened = asyncio.Event()
        self._failure: PenstockError | None = None

    def open(self, first: Iterable[object]) -> None:
        """Tell an engine that is ready the messages that come before all else."""
        for message in first:
            self._send(_wrap("", message))
        self._opened.set()

    def handle_death(self) -> None:
        self._opened.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_result(None)

    def fail_all(self, error: PenstockError) -> None:
        """Refuse what waits for an engine: none will come."""
        self._failure = error
        self.handle_death()
        self._opened.set()

    async def ask(self, message: object) -> Answer:
        """Send a message and wait for its answer; raises EngineFailed if every engine dies of it."""
        for _ in range(MAX_TRIES):
            await self._opened.wait()
            if self._failure is not None:
                raise self._failure
            id = str(next(self._numbers))
            future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
            self._asked[id] = future
            try:
                self._send(_wrap(id, message))
                answer = await future
            finally:
                del self._asked[id]
            if answer is not None:
                return answer
        raise EngineFailed(f"the engine died {MAX_TRIES} times before it answered {type(message).__name__}")

    def take(self, answered: Answered) -> None:
        future = self._asked.get(answered.id)
        if future is not None and not future.done():
            future.set_result(answered.answer)


def _wrap(id: str, message: Any) -> Control:
    return Control(id, type(message).__name__, asdict(message))
