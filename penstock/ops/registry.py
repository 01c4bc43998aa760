"""What an op is: a plain-PyTorch reference with examples and a tolerance, and faster bodies registered beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from penstock.errors import InvalidConfig
from penstock.ops.rows import EachRow, Rows

P = ParamSpec("P")
R = TypeVar("R")
Example = dict[str, Any]  # one call: argument name → value, the first one a tensor

OPS: dict[str, Op[Any, Any]] = {}
REFERENCE_ONLY: set[str] = set()  # device types whose bodies are passed over


class _Choice(threading.local):
    """What the calls of a thread take."""

    exact = False


_CHOICE = _Choice()


def take_exact(exact: bool) -> None:
    """From now on calls of this thread take exact bodies alone, or again each device's usual ones."""
    _CHOICE.exact = exact


def takes_exact() -> bool:
    return _CHOICE.exact


@dataclass(frozen=True)
class Body:
    """One way to compute an op on one kind of device."""

    function: Callable[..., Any]
    exact: bool  # what a row gets does not depend on what else is in the call


class Op(Generic[P, R]):
    """Called like its reference; runs the body of the first argument's device, or the reference where there is none.

    A device may have an exact body and a fast one, which then is the usual one.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        tolerance: Mapping[torch.dtype, float],
        examples: Callable[[], Iterable[Example]] | None,
        rows: Rows,
        rowwise: bool,
    ) -> None:
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self.reference = reference
        self.tolerance = dict(tolerance)
        self.examples = examples
        self.rows = rows
        self.rowwise = rowwise  # the reference itself is exact on a GPU
        self.bodies: dict[str, Body] = {}
        self.exact_bodies: dict[str, Body] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0] if args else next(iter(kwargs.values()))
        device: str = "cpu" if first.is_cpu else first.device.type
        body = (self.exact_bodies if _CHOICE.exact else self.bodies).get(device)
        if body is None or device in REFERENCE_ONLY:
            if _CHOICE.exact and not self.rowwise and device not in REFERENCE_ONLY:
                raise InvalidConfig(
                    f"deterministic=True, but this model takes {self.name}, of which {device} has no "
                    "exact body: leave deterministic out, or set device=cpu"
                )
            return self.reference(*args, **kwargs)
        result: R = body.function(*args, **kwargs)
        return result

    def __repr__(self) -> str:
        return f"<op {self.name}: {', '.join(self.bodies) or 'reference only'}>"

    def impl(self, device: str, *, exact: bool) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register the decorated function as the exact or the fast body for a device type ("cpu", "cuda")."""
        if self.examples is None:
            raise ValueError(f"op {self.name} has no examples to test a {device} body with: pass examples= to @op")
        usual = self.bodies.get(device)
        if device in self.exact_bodies if exact else usual is not None and not usual.exact:
            raise ValueError(f"op {self.name} has {'an exact' if exact else 'a fast'} {device} body already")

        def register(function: Callable[P, R]) -> Callable[P, R]:
            body = Body(function, exact)
            if exact:
                self.exact_bodies[device] = body
            if not exact or device not in self.bodies:
                self.bodies[device] = body
            return function

        return register


def op(
    *,
    tolerance: Mapping[torch.dtype, float],
    examples: Callable[[], Iterable[Example]] | None = None,
    rows: Rows | None = None,
    rowwise: bool = False,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Turn a reference into an op and enter it into OPS.

    `tolerance` bounds, per dtype of the first floating-point argument, how far a body may be from the reference,
    absolutely and relative to it. `rows` says what a row of a call is; by default the first argument's dimension 0.
    `rowwise` says that the reference sums nothing, so that on a GPU a row gets the same from it in any company.
    """

    def register(reference: Callable[P, R]) -> Op[P, R]:
        name = reference.__name__
        if name in OPS:
            raise ValueError(f"op {name} is registered already")
        first = reference.__code__.co_varnames[0]
        OPS[name] = made = Op(reference, tolerance, examples, rows or EachRow(first), rowwise)
        return made

    return register
