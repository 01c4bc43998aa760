"""Random JSON schemas, and an independent judge of what matches them."""

from __future__ import annotations

import datetime
import ipaddress
import random
import re
import uuid
from collections.abc import Callable
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

WORDS = "name age id tag price city note key value unit état 日本".split() + ["two words", 'quo"te', "back\\slash"]
PATTERNS = (
    "^[a-z]{2,6}$",
    "^[A-Z]{3}-[0-9]{4}$",
    "^(red|green|blue)+$",
    "^[a-z]+@[a-z]+\\.(com|org)$",
    "^#[0-9a-f]{6}$",
    "^v\\d+\\.\\d+\\.\\d+$",
    "^[^ ]{1,12}$",
)


def _date(text: str) -> bool:
    """The year 0000, which Python lacks, is a leap year."""
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
        return False
    datetime.date.fromisoformat("2000" + text[4:] if text[:4] == "0000" else text)
    return True


def _time(text: str) -> bool:
    found = re.fullmatch(r"(\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:[Zz]|[+-](\d\d):(\d\d))", text, re.ASCII)
    return found is not None and all(int(part or 0) <= most for part, most in zip(found.groups(), (23, 59, 60, 23, 59)))


FORMATS: dict[str, Callable[[str], object]] = {
    "date": _date,
    "time": _time,
    "date-time": lambda text: text[10:11] in ("T", "t", " ") and _date(text[:10]) and _time(text[11:]),
    "uuid": lambda text: str(uuid.UUID(text)) == text.lower(),
    "ipv4": lambda text: str(ipaddress.IPv4Address(text)),
    "ipv6": lambda text: str(ipaddress.IPv6Address(text)),
    "email": lambda text: re.fullmatch(r"[^@\s]+@[^@\s]+", text),
}
checker = FormatChecker(())
for _name, _check in FORMATS.items():

    def _whole(value: object, check: Callable[[str], object] = _check) -> bool:
        return not isinstance(value, str) or bool(check(value))

    checker.checks(_name, raises=ValueError)(_whole)


def matches(schema: dict[str, Any], value: Any) -> bool:
    return Draft202012Validator(schema, format_checker=checker).is_valid(value)


class Schemas:
    """One after the other, each of all kinds of parts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def next(self) -> dict[str, Any]:
        self._definitions: dict[str, Any] = {}
        self._num_references = 0
        schema = self._schema(self.random.choice((0, 1, 1, 2)))
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _schema(self, depth: int) -> dict[str, Any]:
        makers = [self._string, self._string, self._number, self._integer, self._enum, self._const, self._plain]
        if depth < 3:
            makers += [self._object, self._object, self._array, self._any_of, self._reference] * (2 if depth < 2 else 1)
        return self.random.choice(makers)(depth)

    def _string(self, depth: int) -> dict[str, Any]:
        kind = self.random.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self.random.choice(PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self.random.choice(sorted(FORMATS))}
        schema: dict[str, Any] = {"type": "string"}
        least = self.random.choice((0, 0, 1, 5, 20))
        if least:
            schema["minLength"] = least
        if self.random.random() < 0.4:
            schema["maxLength"] = least + self.random.randrange(0, 30)
        return schema

    def _number(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "number"}
        low = self.random.choice((-1000, -2.5, 0, 0.125, 17, 1e6))
        if self.random.random() < 0.5:
            schema[self.random.choice(("minimum", "exclusiveMinimum"))] = low
        if self.random.random() < 0.4:
            schema[self.random.choice(("maximum", "exclusiveMaximum"))] = low + self.random.choice((0.5, 3, 1000))
        return schema

    def _integer(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer"}
        low = self.random.choice((-100, 0, 1, 7, 18, 1000))
        if self.random.random() < 0.6:
            schema["minimum"] = low
        if self.random.random() < 0.4:
            schema["maximum"] = low + self.random.choice((1, 10, 5000))
        if self.random.random() < 0.15:
            schema["multipleOf"] = self.random.choice((2, 5, 7))
            schema.pop("maximum", None)
        return schema

    def _literal(self) -> Any:
        return self.random.choice(
            (
                None,
                True,
                False,
                0,
                -7,
                3.5,
                "",
                "x",
                "a longer text",
                "naïve",
                [],
                [1, "two"],
                {},
                {"a": {"b": None}},
                *WORDS,
            )
        )

    def _enum(self, depth: int) -> dict[str, Any]:
        values: list[Any] = []
        for _ in range(self.random.randint(1, 5)):
            if (value := self._literal()) not in values:
                values.append(value)
        return {"enum": values}

    def _const(self, depth: int) -> dict[str, Any]:
        return {"const": self._literal()}

    def _plain(self, depth: int) -> dict[str, Any]:
        return self.random.choice(
            ({"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"type": ["integer", "boolean"]}, {})
        )

    def _object(self, depth: int) -> dict[str, Any]:
        names = self.random.sample(WORDS, self.random.randint(0, 5))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._schema(depth + 1) for name in names},
            "required": [name for name in names if self.random.random() < 0.6],
        }
        more = self.random.random()
        if more < 0.6:
            schema["additionalProperties"] = False
        elif more < 0.8:
            schema["additionalProperties"] = self._schema(3)
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self._schema(depth + 1)}
        if self.random.random() < 0.2:
            schema["prefixItems"] = [self._schema(depth + 1) for _ in range(self.random.randint(1, 2))]
        least = self.random.choice((0, 0, 1, 2, 4))
        if least:
            schema["minItems"] = least
        if self.random.random() < 0.5:
            schema["maxItems"] = least + self.random.randint(0, 3)
        return schema

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._schema(depth + 1) for _ in range(self.random.randint(2, 3))]}

    def _reference(self, depth: int) -> dict[str, Any]:
        """To a definition of its own, to an earlier one, or to a list that contains itself."""
        self._num_references += 1
        if self._definitions and self.random.random() < 0.3:
            return {"$ref": "#/$defs/" + self.random.choice(sorted(self._definitions))}
        name = f"d{self._num_references}"
        target = {"$ref": f"#/$defs/{name}"}
        if self.random.random() < 0.3:
            link = {"value": self._schema(3), "next": {"anyOf": [{"type": "null"}, target]}}
            made = {"type": "object", "properties": link, "required": ["value", "next"], "additionalProperties": False}
        else:
            made = self._schema(depth + 1)
        self._definitions[name] = made
        return target
