"""Compare each op's body with its reference on the calls that a model makes."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.api.verify.finding import Finding
from penstock.ops import OPS, Op
from penstock.ops.registry import Body

EACH = 1  # calls of the same sizes that are compared


@dataclass
class OpWatch:
    """Errors of the calls that were compared, in units of the op's tolerance."""

    errors: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    seen: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def findings(self) -> list[Finding]:
        return [
            Finding(f"op {name}", "body against reference", error, 1.0, self.counts[name], self.details.get(name, ""))
            for name, error in sorted(self.errors.items())
        ]


@contextmanager
def watch_ops(device: str) -> Iterator[OpWatch]:
    """Compare calls inside the block. Their results are the bodies'."""
    watch = OpWatch()
    tables = [(op, bodies, dict(bodies)) for op in OPS.values() for bodies in (op.bodies, op.exact_bodies)]
    try:
        for op, bodies, _ in tables:
            if device in bodies:
                bodies[device] = Body(_compare(op, bodies[device].function, watch), bodies[device].exact)
        yield watch
    finally:
        for _, bodies, former in tables:
            bodies.update(former)


def _compare(op: Op[..., Any], body: Callable[..., Any], watch: OpWatch) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        sizes = (op.name, *(_signature(value) for value in (*args, *options.values())))
        if watch.seen[sizes] >= EACH:
            return body(*args, **options)
        watch.seen[sizes] += 1
        theirs, their_options = copy.deepcopy((args, options))  # ops may write into their arguments
        got, wanted = body(*args, **options), op.reference(*theirs, **their_options)
        watch.counts[op.name] += 1
        used = _find_used_rows(op, args, options)
        results = zip(got, wanted) if isinstance(got, tuple) else [(got, wanted)]
        pairs = [(_take(mine, used), _take(reference, used)) for mine, reference in results]
        pairs += [*zip(args, theirs), *zip(options.values(), their_options.values())]
        usual = _tolerance(op, args)
        for mine, reference in pairs:
            if isinstance(mine, Tensor) and isinstance(reference, Tensor):
                tolerance = op.tolerance.get(reference.dtype, usual)
                error = _excess(mine, reference, tolerance)
                if not error <= watch.errors.setdefault(op.name, 0.0):
                    watch.errors[op.name] = error
                    watch.details[op.name] = (
                        f"at sizes {', '.join(str(list(x.shape)) for x in args if isinstance(x, Tensor))}"
                    )
        return got

    return call


def _find_used_rows(op: Op[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
    """Return which rows [T] of a call are tokens: results of padding rows, which have no position or a sequence of
    length 0, are undefined. None if the call does not say."""
    given = inspect.signature(op.reference).bind(*args, **options).arguments
    if isinstance(positions := given.get("positions"), Tensor) and positions.ndim == 1:
        return positions >= 0
    lengths, starts = given.get("lengths"), given.get("query_start")
    if not isinstance(lengths, Tensor) or not isinstance(starts, Tensor):
        return None
    counts = starts.diff().clamp(min=0)
    return (lengths[: len(counts)] > 0).repeat_interleave(counts.to(lengths.device))


def _take(value: Any, used: Tensor | None) -> Any:
    if used is None or not isinstance(value, Tensor) or not value.ndim or len(value) < len(used):
        return value
    return value[: len(used)][used.to(value.device)]


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple | list):
        return tuple(_signature(part) for part in value)
    return str(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__


def _tolerance(op: Op[..., Any], args: tuple[Any, ...]) -> float:
    floats = [value.dtype for value in args if isinstance(value, Tensor) and value.dtype.is_floating_point]
    return op.tolerance.get(floats[0] if floats else torch.float32, max(op.tolerance.values()))


def _excess(got: Tensor, wanted: Tensor, tolerance: float) -> float:
    """Return the largest error of a row in units of tolerance · (its norm + that of ones); infinite where only one is
    finite."""
    if got.shape != wanted.shape:
        return float("inf")
    width = got.shape[-1] if got.ndim else 1
    if not got.numel():
        return 0.0
    a, b = (x.detach().double().reshape(-1, width) for x in (got, wanted))
    usable = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), usable):
        return float("inf")
    if not tolerance:
        return float(not torch.equal(a[usable], b[usable]))
    a, b = a.where(usable, 0.0), b.where(usable, 0.0)
    return float(((a - b).norm(dim=1) / (tolerance * (b.norm(dim=1) + width**0.5))).max())
