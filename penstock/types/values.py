"""Checks of single values, and the one form into which lists and maps are brought."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from penstock.errors import InvalidRequest, shown


def require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name}={shown(value)} is out of range: it must be {limit}")


def is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max  # neither NaN nor infinite, nor a whole number past all floats


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_ids(name: str, values: Seq[int] | None) -> tuple[int, ...] | None:
    if values is None:
        return None
    meant = "a list of token ids, each 0 or more"
    require(isinstance(values, Collection) and not isinstance(values, (str, bytes)), name, values, meant)
    for value in values:
        require(is_count(value) and value >= 0, name, value, meant)
    return tuple(values)


def read_strings(name: str, values: str | Seq[str] | None) -> tuple[str, ...]:
    if values is None:
        return ()
    meant = "a non-empty string or a list of them"
    require(isinstance(values, Collection) and not isinstance(values, (bytes, Mapping)), name, values, meant)
    strings = (values,) if isinstance(values, str) else tuple(values)
    for value in strings:
        require(isinstance(value, str) and value != "", name, value, meant)
    return strings


def read_biases(values: Mapping[int, float] | None) -> dict[int, float] | None:
    if values is None:
        return None
    require(isinstance(values, Mapping), "logit_bias", values, "a map from token id to bias")
    for token, value in values.items():
        require(is_count(token) and token >= 0, "logit_bias", token, "a map from token id to bias")
        require(is_number(value) and -100 <= value <= 100, "logit_bias", value, "-100 to 100")
    return {token: float(value) for token, value in values.items()} or None


def read_callables(name: str, values: Seq[Any] | None) -> tuple[Any, ...] | None:
    if values is None:
        return None
    meant = "a list of callables"
    require(isinstance(values, Collection) and not isinstance(values, (str, bytes, Mapping)), name, values, meant)
    for value in values:
        require(callable(value), name, value, meant)
    return tuple(values) or None
