"""Ops: a plain-PyTorch reference, its tolerance, and faster bodies registered beside it for each device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from penstock.errors import InvalidConfig

P = ParamSpec("P")
R = TypeVar("R")
Example = dict[str, Any]  # one call: argument name → value, the first one a tensor

OPS: dict[str, Op[Any, Any]] = {}
REFERENCE_ONLY: set[str] = set()  # device types whose bodies are passed over


@dataclass(frozen=True)
class Body:
    """One way to compute an op on one kind of device."""

    function: Callable[..., Any]
    exact: bool  # what a row gets does not depend on what else is in the call


class Op(Generic[P, R]):
    """Call like the reference: runs the usual body of the first argument's device, else the reference.

    A device may have an exact body and a fast one, which then is the usual one. A model calls neither: it has an
    `OpTable`.
    """

    def __init__(self, reference: Callable[P, R], tolerance: Mapping[torch.dtype, float], rowwise: bool) -> None:
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self.reference = reference
        self.tolerance = dict(tolerance)
        self.rowwise = rowwise  # the reference itself is exact on a GPU
        self.bodies: dict[str, Body] = {}
        self.exact_bodies: dict[str, Body] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0] if args else next(iter(kwargs.values()))
        return self.bind("cpu" if first.is_cpu else first.device.type)(*args, **kwargs)

    def bind(self, device: str, exact: bool = False) -> Callable[P, R]:
        """Return the body for `device`: its usual one, or with `exact` its exact one."""
        body = (self.exact_bodies if exact else self.bodies).get(device)
        if body is not None and device not in REFERENCE_ONLY:
            return body.function
        if exact and not self.rowwise and device not in REFERENCE_ONLY:
            raise InvalidConfig(
                f"deterministic=True, but op {self.name} has no deterministic {device} kernel: "
                "leave deterministic out, or set device=cpu"
            )
        return self.reference

    def __repr__(self) -> str:
        return f"<op {self.name}: {', '.join(self.bodies) or 'reference only'}>"

    def impl(self, device: str, *, exact: bool) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register the decorated function as the exact or the fast body for a device type ("cpu", "cuda")."""
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


def op(*, tolerance: Mapping[torch.dtype, float], rowwise: bool = False) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Turn a reference into an op and enter it into OPS.

    `tolerance` bounds, per dtype of the first floating-point argument, how far a body may be from the reference,
    absolutely and relative to it. `rowwise` says that the reference sums nothing, so that on a GPU a row gets the same
    from it in any batch. tests/ops/examples has calls of every op.
    """

    def register(reference: Callable[P, R]) -> Op[P, R]:
        name = reference.__name__
        if name in OPS:
            raise ValueError(f"op {name} is registered already")
        OPS[name] = made = Op(reference, tolerance, rowwise)
        return made

    return register


class OpTable:
    """Every op's body for one device, exact or fast: `table.rms_norm(x, weight, eps)`.

    A model is built with one; all its layers call it.
    """

    def __init__(self, device: str, exact: bool = False) -> None:
        self.device, self.exact = device, exact

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        found = OPS.get(name)
        if found is None:
            raise AttributeError(f"there is no op {name!r}")
        return found.bind(self.device, self.exact)
