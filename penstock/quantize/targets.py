"""Name what a model is made into: schemes of storage, methods of rounding, sparsity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.errors import InvalidConfig, quote
from penstock.quantize.gguf.mixes import MIXES

Kind = Literal["int", "fp8", "gguf", "dense"]

SCHEMES = ("int8", "int4", "w8a8", "fp8", "bf16")
METHODS = ("rtn", "gptq", "awq", "smoothquant", "hqq")
SPARSITIES = ("none", "0.5", "2:4")
PRUNERS = ("wanda", "sparsegpt", "magnitude")
GROUPS = (128, 64, 32)
# scheme → methods that make it, the usual one first
MAKERS: dict[str, tuple[str, ...]] = {
    "int8": ("rtn", "gptq", "awq", "hqq"),
    "int4": ("gptq", "awq", "hqq", "rtn"),
    "w8a8": ("smoothquant", "gptq", "rtn"),
    "fp8": ("rtn", "smoothquant"),
    "bf16": ("rtn",),
    "gguf": ("rtn", "awq"),
}


@dataclass(frozen=True)
class Target:
    """A scheme and the way there."""

    scheme: str
    kind: Kind
    method: str
    bits: int = 16
    group: int = 0  # inputs that share a scale; 0: all of an output
    symmetric: bool = True
    activations: Literal["", "int8", "fp8"] = ""  # what inputs are rounded to, a scale for each token
    mix: str = ""  # of GGUF types
    sparsity: str = "none"
    prune: str = "wanda"
    act_order: bool = False

    @property
    def wants_squares(self) -> bool:
        """The sums of products of all pairs of inputs are needed, not their squares alone."""
        return self.method in ("gptq", "awq") or (self.sparsity != "none" and self.prune == "sparsegpt")


def make_target(
    scheme: str,
    method: str | None = None,
    group_size: int | None = None,
    sparsity: str = "none",
    prune: str | None = None,
    act_order: bool | None = None,
) -> Target:
    """Check the names of a run and what goes together."""
    mix, base = "", scheme
    if scheme.lower().startswith("gguf:"):
        mix, base = _find_mix(scheme), "gguf"
    elif scheme not in SCHEMES:
        raise InvalidConfig(
            f"scheme={quote(scheme)} is unknown; known: {', '.join(SCHEMES)}, and gguf: followed by one of "
            f"{', '.join(MIXES)}"
        )
    method = method or MAKERS[base][0]
    _require("method", method, METHODS)
    _require("sparsity", sparsity, SPARSITIES)
    _require("prune", prune or PRUNERS[0], PRUNERS)
    if method not in MAKERS[base]:
        makes = ", ".join(name for name, makers in MAKERS.items() if method in makers)
        raise InvalidConfig(
            f"method={method} does not make scheme={scheme}: use {' or '.join(MAKERS[base])}; {method} makes {makes}"
        )
    if act_order is not None and method != "gptq":
        raise InvalidConfig(f"act_order belongs to method=gptq, not to method={method}: leave it out")
    _check_pruning(sparsity, prune, act_order)
    _check_group(base, scheme, group_size)
    common = {
        "sparsity": sparsity, "prune": prune or PRUNERS[0], "act_order": method == "gptq" and act_order is not False
    }  # fmt: skip
    if base == "gguf" and sparsity != "none":
        raise InvalidConfig(
            f"sparsity={sparsity} does not go with scheme={scheme}: GGUF's types store zeros like other "
            f"values, and not all can; use {', '.join(SCHEMES)}"
        )
    if base == "gguf":
        return Target(scheme, "gguf", method, mix=mix, **common)  # type: ignore[arg-type]
    if base == "bf16":
        return Target(scheme, "dense", method, **common)  # type: ignore[arg-type]
    if base == "fp8":
        return Target(scheme, "fp8", method, 8, activations="fp8", **common)  # type: ignore[arg-type]
    if base == "w8a8":
        return Target(scheme, "int", method, 8, activations="int8", **common)  # type: ignore[arg-type]
    return Target(
        scheme, "int", method, int(base[3:]), group_size or 0, symmetric=method != "hqq", **common  # type: ignore[arg-type]
    )  # fmt: skip


def _require(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidConfig(f"{name}={quote(value)} is unknown; known: {', '.join(known)}")


def _find_mix(scheme: str) -> str:
    name = scheme[len("gguf:") :].upper()
    if name not in MIXES:
        raise InvalidConfig(f"scheme={quote(scheme)} names no GGUF type; known: {', '.join(MIXES)}")
    return name


def _check_pruning(sparsity: str, prune: str | None, act_order: bool | None) -> None:
    if prune is not None and sparsity == "none":
        raise InvalidConfig(
            f"prune={prune} chooses which weights become zero: add --sparsity 0.5 or 2:4, or leave it out"
        )
    if act_order and prune == "sparsegpt":
        raise InvalidConfig(
            "act_order=True does not go with prune=sparsegpt, which takes the inputs as they lie: leave it out"
        )


def _check_group(base: str, scheme: str, group_size: int | None) -> None:
    if group_size is None:
        return
    if base not in ("int8", "int4"):
        raise InvalidConfig(f"group_size={group_size} has no meaning for scheme={scheme}: leave it out")
    if group_size < 0 or group_size % 8:
        raise InvalidConfig(f"group_size={group_size} must be a multiple of 8, or 0 for one scale per output")


def choose_group(target: Target, widths: set[int], group_size: int | None) -> int:
    """Return the group size: the user's if it divides every width, else the usual one that does."""
    if target.kind != "int" or target.activations:
        return 0
    fitting = [size for size in GROUPS if all(width % size == 0 for width in widths)]
    if group_size is None:
        if target.bits == 8:
            return 0
        if not fitting:
            raise InvalidConfig(
                f"no group of {', '.join(map(str, GROUPS))} divides {_list(widths)}: give --group-size 0"
            )
        return fitting[0]
    odd = sorted(width for width in widths if group_size and width % group_size)
    if odd:
        would = [size for size in (256, *GROUPS, 16, 8) if all(width % size == 0 for width in widths)]
        raise InvalidConfig(
            f"group_size={group_size} does not divide the width {_list(set(odd))} of the model's matrices; "
            f"{', '.join(map(str, would)) or 'no other'} would, or 0 for one scale per output"
        )
    return group_size


def _list(widths: set[int]) -> str:
    return " and ".join(map(str, sorted(widths)))
