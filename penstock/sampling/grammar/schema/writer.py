"""Rewrite a schema part by part; the modules beside this one rewrite each keyword."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import InvalidRequest
from penstock.sampling.grammar.schema.disjoint import Disjointness
from penstock.sampling.grammar.schema.negation import Schema, as_list, assertions
from penstock.sampling.grammar.schema.references import LITERAL, References, pointer

Path = tuple[str | int, ...]
MAX_SCHEMAS = 30_000  # written in total; a part may be written several times
MAX_STEPS = 300_000  # when looking for cycles
MAX_DEPTH = 100
MAX_PLACE = 160  # characters of a path in a message
MAX_BRANCHES = 128  # alternatives in one schema: llguidance writes out each
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
class SchemaPart:
    """One schema being rewritten: `said` is the input, `written` the output, `more` must match as well."""

    said: Schema
    path: Path
    max_branches: int = MAX_BRANCHES
    written: Schema = field(default_factory=dict)
    more: list[Any] = field(default_factory=list)
    num_branches: int = 1

    def may_branch(self, num: int) -> bool:
        """Multiply the alternatives by `num`, unless there are too many."""
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
    """Rewrites one schema. `relaxed` lists the keywords left out, with their paths."""

    def __init__(
        self, root: Any, strict: bool, keywords: Mapping[str, Write], left_out: frozenset[str] = frozenset()
    ) -> None:
        self.strict, self.left_out = strict, left_out
        self.relaxed: dict[str, None] = {}
        self.references = References(root)
        self.apart = Disjointness(self.follow)
        self.num_branches = 1  # of the last schema written
        self._keywords = keywords
        self._definitions: dict[int, tuple[str, Schema, Path]] = {}  # by id() of the schema
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
        """Leave a keyword out, or refuse a strict request."""
        place = pointer(path) or "/"
        place = place if len(place) <= MAX_PLACE else "..." + place[-MAX_PLACE:]
        if self.strict:
            why = f" ({why})" if why else ""
            raise InvalidRequest(
                f"structured_outputs: {keyword} at {place} cannot be enforced{why}: remove it, or "
                "allow relaxing it with strict: false"
            )
        self.relaxed[f"{keyword} at {place}"] = None

    def schema(self, part: Any, path: Path, max_branches: int = MAX_BRANCHES, is_definition: bool = False) -> Any:
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS or len(path) > MAX_DEPTH:
            raise InvalidRequest(
                f"structured_outputs: the schema is too large: it has more than "
                f"{MAX_SCHEMAS} parts, or is nested more than {MAX_DEPTH} deep; give a simpler one"
            )
        self.num_branches = 1
        if isinstance(part, bool):
            return part
        if not isinstance(part, dict):
            raise InvalidRequest(
                f"structured_outputs: at {pointer(path) or '/'} the schema is not an object; correct it"
            )
        work = SchemaPart(assertions(part), path, max_branches)
        if not is_definition and self._merges_circle(work.said):
            return self._define(part, path)
        for key, value in work.said.items():
            if key in PLAIN:
                work.written[key] = value
            elif key in self._keywords:
                self._keywords[key](self, work, value, (*path, key))
        self.num_branches = work.num_branches
        return work.finish()

    def write_for_merge(self, part: Any, path: Path, max_branches: int = MAX_BRANCHES) -> Any:
        """Like `schema`, for a part that llguidance will merge. It cannot merge a reference to a schema that it is
        reading, but can merge the schema itself."""
        reference = part.get("$ref") if isinstance(part, dict) else None
        if isinstance(reference, str) and len(assertions(part)) == 1 and self._is_circular(reference):
            return self.schema(self.follow(reference), path, max_branches, is_definition=True)
        return self.schema(part, path, max_branches)

    def follow(self, reference: str) -> Any:
        """Return the schema a reference names, through references that say nothing else."""
        seen: set[str] = set()
        while True:
            if reference in seen:
                raise InvalidRequest(
                    f"structured_outputs: the reference {reference} only leads back to itself; correct it"
                )
            seen.add(reference)
            found = self.references.follow(reference)
            said = found if isinstance(found, dict) else {}
            if not isinstance(said.get("$ref"), str) or len(assertions(said)) > 1:
                return found
            reference = said["$ref"]

    def reference(self, value: str) -> Any:
        found = self.follow(value)
        if found is self.references.root:
            return {"$ref": "#"}
        return self._define(found, tuple(value[2:].split("/"))) if isinstance(found, dict) else found

    def _define(self, part: Schema, path: Path) -> Schema:
        name, _, _ = self._definitions.setdefault(id(part), (f"d{len(self._definitions)}", part, path))
        return {"$ref": f"#/$defs/{name}"}

    def _merges_circle(self, said: Schema) -> bool:
        """True if a recursive schema would be merged with another."""
        write_for_merge = [said["$ref"]] if len(said) > 1 and "$ref" in said else []
        for key in ("allOf", "anyOf", "oneOf"):
            write_for_merge += [
                one["$ref"] for one in as_list(said.get(key, [])) if isinstance(one, dict) and "$ref" in one
            ]
        return any(isinstance(reference, str) and self._is_circular(reference) for reference in write_for_merge)

    def _is_circular(self, reference: str) -> bool:
        """True if the references inside lead back to `reference`."""
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
                    "structured_outputs: the schema has too many nested references; give a simpler one"
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


Write = Callable[[Writer, SchemaPart, Any, Path], None]
