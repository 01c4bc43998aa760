"""Writing a schema anew, part by part; what each keyword becomes is in the modules beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import InvalidRequest
from penstock.sampling.schema_apart import Apart
from penstock.sampling.schema_not import Schema, as_list, assertions
from penstock.sampling.schema_refs import LITERAL, References, pointer

Path = tuple[str | int, ...]
MAX_SCHEMAS = 30_000  # written in all: parts may be written several times
MAX_STEPS = 300_000  # from part to part, in looking for circles
MAX_DEPTH = 100
MAX_PLACE = 160  # characters of a place that are told
MAX_BRANCHES = 128  # ways through one schema: llguidance writes each of them out
PLAIN = frozenset(
    {
        "type",
        "const",
        "enum",
        "required",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minItems",
        "maxItems",
    }
)


@dataclass
class Part:
    """One schema on its way: `said` as it was given, `written` as llguidance will read it, and `more` that must match
    besides."""

    said: Schema
    path: Path
    max_branches: int = MAX_BRANCHES
    written: Schema = field(default_factory=dict)
    more: list[Any] = field(default_factory=list)
    num_branches: int = 1

    def may_branch(self, num: int) -> bool:
        """Take `num` ways through it in the place of each, unless there are too many."""
        if num > 1 and self.num_branches * num > self.max_branches:
            return False
        self.num_branches *= max(1, num)
        return True

    @property
    def is_object(self) -> bool:
        return self.said.get("type") in ("object", ["object"])

    def require(self, schema: Any) -> None:
        if schema is not True:
            self.more.append(schema)

    def finish(self) -> Any:
        if any(one is False for one in self.more):
            return False
        if self.more:
            self.written["allOf"] = [*self.written.get("allOf", ()), *self.more]
        return self.written


class Writer:
    """Writes one schema. `relaxed` names what was left out of it, with its place."""

    def __init__(
        self, root: Any, strict: bool, keywords: Mapping[str, Write], left_out: frozenset[str] = frozenset()
    ) -> None:
        self.strict = strict
        self.left_out = left_out
        self.relaxed: dict[str, None] = {}
        self.references = References(root)
        self.apart = Apart(self.follow)
        self.num_branches = 1  # of the schema that was written last
        self._keywords = keywords
        self._definitions: dict[int, tuple[str, Schema, Path]] = {}  # by the schema's identity
        self._circular: dict[str, bool] = {}
        self._num_schemas = self._num_steps = 0

    def write(self) -> Schema:
        root = self.schema(self.references.root, ())
        definitions: Schema = {}
        while len(definitions) < len(self._definitions):
            for name, part, path in list(self._definitions.values())[len(definitions) :]:
                definitions[name] = self.schema(part, path, is_definition=True)
        if isinstance(root, bool):
            return {} if root else {"allOf": [False]}
        return {**root, "$defs": definitions} if definitions else root

    def relax(self, keyword: str, path: Path, why: str = "") -> None:
        """Leave a keyword out, or refuse it."""
        place = pointer(path) or "/"
        place = place if len(place) <= MAX_PLACE else "..." + place[-MAX_PLACE:]
        if self.strict:
            why = f" ({why})" if why else ""
            raise InvalidRequest(
                f"structured_outputs: {keyword} at {place} cannot be enforced{why}: take it out, or "
                "let it be relaxed with strict: false"
            )
        self.relaxed[f"{keyword} at {place}"] = None

    def schema(self, part: Any, path: Path, max_branches: int = MAX_BRANCHES, is_definition: bool = False) -> Any:
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS or len(path) > MAX_DEPTH:
            raise InvalidRequest(
                f"structured_outputs: the schema is too large: written out it has more than "
                f"{MAX_SCHEMAS} parts, or more than {MAX_DEPTH} within each other; give a simpler one"
            )
        self.num_branches = 1
        if isinstance(part, bool):
            return part
        if not isinstance(part, dict):
            raise InvalidRequest(f"structured_outputs: at {pointer(path) or '/'} the schema is no object: mend it")
        work = Part(assertions(part), path, max_branches)
        if not is_definition and self._merges_circle(work.said):
            return self._define(part, path)
        for key, value in work.said.items():
            if key in PLAIN:
                work.written[key] = value
            elif key in self._keywords:
                self._keywords[key](self, work, value, (*path, key))
        self.num_branches = work.num_branches
        return work.finish()

    def merged(self, part: Any, path: Path, max_branches: int = MAX_BRANCHES) -> Any:
        """As `schema`, for one that llguidance will merge with others: a reference to a schema that it is just reading
        cannot be merged, the schema itself can."""
        reference = part.get("$ref") if isinstance(part, dict) else None
        if isinstance(reference, str) and len(assertions(part)) == 1 and self._is_circular(reference):
            return self.schema(self.follow(reference), path, max_branches, is_definition=True)
        return self.schema(part, path, max_branches)

    # references

    def follow(self, reference: str) -> Any:
        """The schema that a reference leads to, through others that say nothing else."""
        seen: set[str] = set()
        while True:
            if reference in seen:
                raise InvalidRequest(
                    f"structured_outputs: the reference {reference} leads back to itself and to no schema: mend it"
                )
            seen.add(reference)
            found = self.references.follow(reference)
            said = found if isinstance(found, dict) else {}
            if not isinstance(said.get("$ref"), str) or len(assertions(said)) > 1:
                return found
            reference = said["$ref"]

    def reference(self, value: str) -> Any:
        """Write a reference."""
        found = self.follow(value)
        if found is self.references.root:
            return {"$ref": "#"}
        return self._define(found, tuple(value[2:].split("/"))) if isinstance(found, dict) else found

    def _define(self, part: Schema, path: Path) -> Schema:
        name, _, _ = self._definitions.setdefault(id(part), (f"d{len(self._definitions)}", part, path))
        return {"$ref": f"#/$defs/{name}"}

    def _merges_circle(self, said: Schema) -> bool:
        """A schema that it is itself within is to be merged with another."""
        merged = [said["$ref"]] if len(said) > 1 and "$ref" in said else []
        for key in ("allOf", "anyOf", "oneOf"):
            merged += [one["$ref"] for one in as_list(said.get(key, [])) if isinstance(one, dict) and "$ref" in one]
        return any(isinstance(reference, str) and self._is_circular(reference) for reference in merged)

    def _is_circular(self, reference: str) -> bool:
        """Following it, and all references in what is found, one comes to it again."""
        if reference not in self._circular:
            self._circular[reference] = self._comes_back(self.follow(reference))
        return self._circular[reference]

    def _comes_back(self, begin: Any) -> bool:
        seen: set[int] = set()
        todo = [begin]
        while todo:
            part = todo.pop()
            self._num_steps += 1
            if self._num_steps > MAX_STEPS:
                raise InvalidRequest(
                    "structured_outputs: the schema has too many references within each other: give a simpler one"
                )
            if isinstance(part, dict):
                if isinstance(part.get("$ref"), str):
                    found = self.follow(part["$ref"])
                    if found is begin:
                        return True
                    if id(found) not in seen:
                        seen.add(id(found))
                        todo.append(found)
                todo += [
                    value
                    for key, value in part.items()
                    if isinstance(value, (dict, list)) and key not in LITERAL and key not in ("$defs", "definitions")
                ]
            elif isinstance(part, list):
                todo += [one for one in part if isinstance(one, (dict, list))]
        return False


Write = Callable[[Writer, Part, Any, Path], None]
