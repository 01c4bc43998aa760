"""JSON schemas in the keywords that llguidance knows.

What it does not know is said in other words where there are such words; the answers then match the schema as it was
given. Elsewhere the keyword is relaxed: what is left matches all that the given schema does, and more. Each relaxed
keyword is named with its place; a strict request is refused instead.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from penstock.errors import InvalidRequest
from penstock.sampling import schema_arrays, schema_logic, schema_objects, schema_text
from penstock.sampling.schema_writer import Writer

MAX_RELAXED = 32  # named; of others there is only the number
MAX_WRITTEN = 1 << 22  # characters
KEYWORDS = {**schema_logic.KEYWORDS, **schema_text.KEYWORDS, **schema_arrays.KEYWORDS, **schema_objects.KEYWORDS}


def write_schema(text: str, strict: bool, left_out: Collection[str] = ()) -> tuple[str, tuple[str, ...]]:
    """The schema as llguidance reads it, and what was relaxed in it: `minProperties` (with `maxProperties`) or
    `patternProperties` (with `propertyNames`) everywhere, where they are `left_out`."""
    writer = Writer(json.loads(text), strict, KEYWORDS, frozenset(left_out))
    written = json.dumps(writer.write())
    if len(written) > MAX_WRITTEN:
        raise InvalidRequest(
            f"structured_outputs: the schema is too large: written out it has {len(written)} "
            f"characters, and {MAX_WRITTEN} are compiled; give a simpler one"
        )
    relaxed = tuple(writer.relaxed)
    if len(relaxed) > MAX_RELAXED:
        relaxed = (*relaxed[: MAX_RELAXED - 1], f"and {len(relaxed) - MAX_RELAXED + 1} more")
    return written, relaxed
