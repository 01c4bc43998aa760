"""Normalise the references of a schema to JSON pointers."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from penstock.errors import InvalidRequest, quote

Schema = dict[str, Any]
LITERAL = frozenset({"const", "enum", "default", "examples", "example"})  # JSON inside these is not a schema
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def pointer(path: tuple[str | int, ...]) -> str:
    """Write a path as a JSON pointer."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)


class References:
    """Rewrites every reference in `root` to `$ref: "#/…"`, in place. A dangling one stays and is refused only when
    followed."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._resources: dict[str, tuple[str | int, ...]] = {"": ()}
        self._anchors: dict[tuple[str, str], tuple[str | int, ...]] = {}
        self._found: list[tuple[Schema, str]] = []  # schemas with a reference, and their base URI
        self._targets: dict[str, Any] = {"#": root}
        self._is_draft_4 = isinstance(root, dict) and "draft-04" in str(root.get("$schema"))
        self._walk()
        for schema, base in self._found:
            self._settle(schema, base)

    def follow(self, reference: str) -> Any:
        """Return the schema that a normalised reference names."""
        if reference not in self._targets:
            raise InvalidRequest(
                f"structured_outputs: the reference {quote(reference)} leads nowhere in the schema: "
                "nothing is fetched from elsewhere; put what it names into $defs"
            )
        return self._targets[reference]

    def _walk(self) -> None:
        todo: list[tuple[Any, tuple[str | int, ...], str]] = [(self.root, (), "")]
        while todo:
            part, path, base = todo.pop()
            if isinstance(part, list):
                todo += [(item, (*path, place), base) for place, item in enumerate(part)]
            if not isinstance(part, dict):
                continue
            base = self._note(part, path, base)
            if any(isinstance(part.get(name), str) for name in REFERENCES):
                self._found.append((part, base))
            todo += [
                (value, (*path, key), base)
                for key, value in part.items()
                if key not in LITERAL and isinstance(value, (dict, list))
            ]

    def _note(self, part: Schema, path: tuple[str | int, ...], base: str) -> str:
        for name in ("$id", "id"):
            id = part.get(name)
            if isinstance(id, str) and id.startswith("#"):
                self._anchors.setdefault((base, id[1:]), path)
            elif isinstance(id, str) and (name == "$id" or not path or self._is_draft_4):
                base = urldefrag(_join(base, id))[0]
                self._resources.setdefault(base, path)
                break
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(part.get(name), str):
                self._anchors.setdefault((base, part[name]), path)
        return base

    def _settle(self, schema: Schema, base: str) -> None:
        name = next(name for name in REFERENCES if isinstance(schema.get(name), str))
        path = self._path(schema[name], base)
        if name == "$dynamicRef":
            path = self._outermost(schema[name], path)
        if path is None:
            return
        reference = "#" + pointer(path)
        if reference not in self._targets:
            try:
                self._targets[reference] = self._at(path)
            except (KeyError, IndexError, ValueError, TypeError):
                return
        renamed = {"$ref" if key == name else key: value for key, value in schema.items()}
        schema.clear()
        schema.update({**renamed, "$ref": reference})

    def _path(self, reference: str, base: str) -> tuple[str | int, ...] | None:
        uri, fragment = urldefrag(_join(base, reference))
        place = self._resources.get(uri)
        if place is None:
            return None
        if not fragment.startswith("/"):
            return self._anchors.get((uri, unquote(fragment))) if fragment else place
        keys = fragment[1:].split("/")
        return (*place, *(unquote(key).replace("~1", "/").replace("~0", "~") for key in keys))

    def _outermost(self, reference: str, path: tuple[str | int, ...] | None) -> tuple[str | int, ...] | None:
        """Resolve a dynamic reference to the outermost schema with that anchor: in one document, the shortest path."""
        name = urldefrag(reference)[1]
        places = [place for (_, anchor), place in self._anchors.items() if anchor == name]
        return min(places, key=len, default=path)

    def _at(self, path: tuple[str | int, ...]) -> Any:
        part = self.root
        for key in path:
            part = part[int(key)] if isinstance(part, list) else part[key]
        if not isinstance(part, (dict, bool)):
            raise TypeError
        return part


def _join(base: str, reference: str) -> str:
    """Join like `urljoin`, but keep schemes it does not know, such as `urn:`."""
    if reference.startswith("#"):
        return urldefrag(base)[0] + reference
    try:
        return reference if ":" in reference.split("/")[0] else urljoin(base, reference)
    except ValueError:
        return reference
