"""Shapes and dtypes of the torch functions that steps call, on the meta device. Torch knows them too, but its first
answer takes a second or more: it imports torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isfinite", "logical_and", "logical_or", "logical_not"}
NATIVE = {"_to_copy", "copy_", "clone", "fill_", "zero_"}  # torch answers these without its compiler


def _empty(shape: Any, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def _broadcast(shapes: list[torch.Size]) -> list[int]:
    result = [1] * max(len(shape) for shape in shapes)
    for shape in shapes:
        for i in range(1, len(shape) + 1):
            result[-i] = shape[-i] if result[-i] == 1 else result[-i]
    return result


def _elementwise(name: str, args: tuple[Any, ...]) -> Tensor:
    if name.endswith("_"):
        given: Tensor = args[0]
        return given
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    numbers = tensors if name != "where" else tensors[1:]
    dtype = numbers[0].dtype
    for other in args[1:2] if name != "where" else args[2:3]:
        if isinstance(other, (Tensor, int, float)):
            dtype = torch.result_type(numbers[0], other)
    if name in COMPARISONS:
        dtype = torch.bool
    elif name in ("div", "rsqrt", "cos", "sin", "exp") and not dtype.is_floating_point:
        dtype = torch.float32
    return _empty(_broadcast([tensor.shape for tensor in tensors]), tensors[0], dtype)


def _arange(*ends: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    start, end, step = (0, ends[0], 1) if len(ends) == 1 else (*ends, 1)[:3]
    kind = dtype or (torch.int64 if all(isinstance(value, int) for value in ends) else torch.float32)
    return torch.empty(max(0, -int(-(end - start) // step)), dtype=kind, device=device)


def _mm(a: Tensor, b: Tensor, **_: Any) -> Tensor:
    return _empty((a.shape[0], b.shape[1]), a)


def _addmm(added: Tensor, a: Tensor, b: Tensor, out: Tensor | None = None, **_: Any) -> Tensor:
    return _mm(a, b) if out is None else out


def _index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Index the first dimensions, by positions only."""
    if any(index is None or index.dtype in (torch.bool, torch.uint8) for index in indices):
        return cast(Tensor, NotImplemented)
    shape = _broadcast([index.shape for index in indices if index is not None])
    return _empty((*shape, *x.shape[len(indices) :]), x)


def _embedding(weight: Tensor, ids: Tensor, *_: Any) -> Tensor:
    return _empty((*ids.shape, weight.shape[1]), weight)


def _like(x: Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
    return _empty(x.shape, x, dtype)


def _reduce(x: Tensor, dims: Any = (), keepdim: bool = False) -> Tensor:
    over = {dim % x.dim() for dim in (dims or range(x.dim()))}
    return _empty([1 if i in over else size for i, size in enumerate(x.shape) if keepdim or i not in over], x)


def _scaled_mm(a: Tensor, b: Tensor, *rest: Any, out_dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    positional = rest[4] if len(rest) > 4 else None  # after two scales, a bias and the result's scale
    return _empty((a.shape[0], b.shape[1]), a, out_dtype or positional)


RULES: dict[str, Callable[..., Tensor]] = {
    "arange": _arange,
    "mm": _mm,
    "addmm": _addmm,
    "index": _index,
    "embedding": _embedding,
    "full_like": _like,
    "amax": _reduce,
    "amin": _reduce,
    "_scaled_mm": _scaled_mm,
    "floor_divide": lambda *args: _elementwise("floor_divide", args),  # which torch does not call pointwise
}


class MetaShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answer RULES and elementwise functions of meta tensors inside a `with` block."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to skip dynamo, torch would import it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        made: Any = NotImplemented
        if _on_meta(args, kwargs):
            if name in RULES:
                made = RULES[name](*args, **kwargs)
            elif torch.Tag.pointwise in func.tags and name not in NATIVE and not kwargs:
                made = _elementwise(name, args)
        return func(*args, **kwargs) if made is NotImplemented else made


def _on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not tensors:
        return kwargs.get("device") == torch.device("meta")
    return all(tensor.is_meta for tensor in tensors)
