"""Records: the parts a body is made of, which stop at the first error and bound what they do not know the form of."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from penstock.server.unknown import UnknownKeys

MAX_ENTRIES = 1_000  # of a map from names to plain values, unless its field says otherwise
MAX_FREE_VALUES = 100_000  # in all the JSON of a body whose form is free: schemas, arguments, template values
MAX_FREE_CHARS = 4 << 20
MAX_FREE_DEPTH = 64

_MAPS_FAIL_FAST = "fail_fast" in signature(core_schema.dict_schema).parameters  # older releases: lists alone
# where schemas stand in a schema
_INNER = ("schema", "fields", "items_schema", "keys_schema", "values_schema", "choices", "extras_schema", "definitions")


@dataclass
class Budget:
    """The values and characters that free-form JSON may still have in a body, and which of its keys are unknown."""

    num_values: int = MAX_FREE_VALUES
    num_chars: int = MAX_FREE_CHARS
    unknown: UnknownKeys = field(default_factory=UnknownKeys)

    def take(self, value: Any) -> None:
        """Count a value and all within it; stop where there are too many or they lie too deep."""
        self._count(1, 0)
        level = [value]
        for _ in range(MAX_FREE_DEPTH):
            below: list[Any] = []
            for one in level:
                if isinstance(one, str):
                    self._count(0, len(one))
                elif isinstance(one, dict):
                    self._count(len(one), sum(map(len, one)))
                    below += one.values()
                elif isinstance(one, list):
                    self._count(len(one), 0)
                    below += one
            if not below:
                return
            level = below
        raise ValueError(f"it is nested more than {MAX_FREE_DEPTH} levels deep: flatten it")

    def _count(self, num_values: int, num_chars: int) -> None:
        self.num_values -= num_values
        self.num_chars -= num_chars
        if self.num_values < 0:
            raise ValueError(f"a body may hold {MAX_FREE_VALUES} values of free form in all: send less at once")
        if self.num_chars < 0:
            raise ValueError(f"values of free form may have {MAX_FREE_CHARS} characters in all: send less at once")


@dataclass(frozen=True)
class _Few:
    """Refuses a map of many entries before each of them is looked at."""

    most: int

    def __call__(self, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > self.most:
            raise ValueError(f"it has {len(given)} entries: the limit is {self.most}; send fewer")
        return given


def _within_budget(value: Any, info: ValidationInfo) -> Any:
    if isinstance(info.context, Budget):
        info.context.take(value)
    return value


def _bounded(schema: Any, source: Any) -> Any:
    """Put the bounds of this module into a schema of pydantic's; other models within it have their own."""
    if isinstance(schema, (list, tuple)):
        return type(schema)(_bounded(one, source) for one in schema)
    if not isinstance(schema, dict) or _is_done(schema) or _is_other(schema, source):
        return schema
    if not isinstance(schema.get("type"), str):  # by the names of fields, of which one may be "type", or tags
        return {name: _bounded(one, source) for name, one in schema.items()}
    made = {key: _bounded(value, source) if key in _INNER else value for key, value in schema.items()}
    if schema["type"] == "list":
        made["fail_fast"] = True
    elif schema["type"] == "any" or schema["type"] == "dict" and schema["values_schema"]["type"] == "any":
        return core_schema.with_info_before_validator_function(_within_budget, schema)  # type: ignore[arg-type]
    elif schema["type"] == "dict":
        few = _Few(made.setdefault("max_length", MAX_ENTRIES))
        if _MAPS_FAIL_FAST:
            made["fail_fast"] = True
        return core_schema.no_info_before_validator_function(few, made)  # type: ignore[arg-type]
    return made


def _is_other(schema: dict[str, Any], source: Any) -> bool:
    return schema.get("type") == "model" and schema["cls"] is not source


def _is_done(schema: dict[str, Any]) -> bool:
    """A schema is seen again where its model is part of another one."""
    function = schema["function"].get("function") if schema.get("type") == "function-before" else None
    return function is _within_budget or isinstance(function, _Few)


class Record(BaseModel):
    """A part of a body. Its lists stop at the first wrong element, its maps are bounded before they are looked into,
    and values of free form are counted against the body's budget, where validation is given one."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        made: CoreSchema = _bounded(handler(source), source)
        return made
