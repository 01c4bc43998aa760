"""The engine's view of the devices: plans, and control messages, which are obeyed in order with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from penstock.engine.plan import Plan, Result
from penstock.errors import InvalidRequest

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Describe:
    """Ask for the executor's device, the plans it has begun and the bytes of its KV cache."""


@dataclass(frozen=True, slots=True)
class LoadLora:
    """Read an adapter from a folder into host memory, under a number. With a fingerprint: only if its files are still
    those. The answer tells the fingerprint, the rank and the bytes."""

    number: int
    path: str
    fingerprint: str = ""
    rank: int = 0  # 0: it was not read before


@dataclass(frozen=True, slots=True)
class DropLora:
    """Free an adapter that no running sequence uses."""

    number: int


@dataclass(frozen=True, slots=True)
class SaveSession:
    """Have all of a session's path in the store. The answer tells its tokens, adapters and salt."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True)
class EraseSession:
    """Keep a session's path no longer than any other. The answer tells its positions."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True)
class Answer:
    values: Values = field(default_factory=dict)
    error: str | None = None  # the message was refused


MESSAGES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Describe, LoadLora, DropLora, SaveSession, EraseSession)
}


def make_message(name: str, values: Mapping[str, Any]) -> Any:
    """Make the message of this name; raises InvalidRequest for an unknown name or field."""
    try:
        return MESSAGES[name](**values)
    except (KeyError, TypeError):
        raise InvalidRequest(
            f"control message {name} with {sorted(values) or 'no values'} is unknown: send {', '.join(MESSAGES)}"
        ) from None


def obey(message: object, handlers: Mapping[type[Any], Callable[[Any], Values]]) -> Answer:
    """Answer a message by the handler of its type, or refuse it by name."""
    handler = handlers.get(type(message))
    if handler is None:
        known = ", ".join(kind.__name__ for kind in handlers)
        return Answer(error=f"control message {type(message).__name__} is unknown to this executor: send {known}")
    return Answer(handler(message))


Out = TypeVar("Out", covariant=True)


class Ticket(Protocol[Out]):
    def result(self) -> Out:
        """Wait for the end. A step that failed is a result with `error` set."""


class Awaited(Ticket[Out], Protocol[Out]):
    """A ticket that can be asked."""

    @property
    def is_done(self) -> bool:
        """True if `result` would not wait."""


class Executor(Protocol):
    @property
    def verifies_trees(self) -> bool:
        """True if drafts may be trees; otherwise plans have lines of draft tokens alone."""

    def start(self, plan: Plan) -> Ticket[Result]:
        """Begin a plan. Plans run in the order they were started."""

    def control(self, message: object) -> Awaited[Answer]:
        """Obey a message of `engine.executor` after the plans started before it, or refuse it by name."""

    def close(self) -> None:
        """Free all that the executor holds."""


@dataclass(frozen=True)
class Done(Generic[Out]):
    """The ticket of what ended as it was started."""

    outcome: Out
    is_done: ClassVar[bool] = True

    def result(self) -> Out:
        return self.outcome
