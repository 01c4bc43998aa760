"""What of a schema is relaxed, in the Python interface."""

from __future__ import annotations

import json
import logging

import pytest

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.errors import InvalidRequest

SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2, "uniqueItems": True}


def test_it_is_refused_unless_it_may_be_relaxed(text_llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    strict = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    with pytest.raises(InvalidRequest, match="uniqueItems at / cannot be enforced: remove it, or .* strict: false"):
        text_llm.generate("Tags:", strict)
    loose = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(json=SCHEMA, strict=False))
    with caplog.at_level(logging.WARNING, "penstock"):
        outputs = [text_llm.generate("Tags:", loose)[0].outputs[0] for _ in range(2)]
    assert all(output.relaxed == ("uniqueItems at /",) for output in outputs)
    assert 1 <= len(json.loads(outputs[0].text)) <= 2
    assert [record.message for record in caplog.records] == ["relaxed keywords in a JSON schema: uniqueItems at /"]
    plain = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(json={"type": "array"}))
    assert text_llm.generate("Tags:", plain)[0].outputs[0].relaxed == ()


def test_structural_tags(text_llm: LLM) -> None:
    form = {
        "type": "tag",
        "begin": "<n>",
        "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
        "end": "</n>",
    }
    asked = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})
    text = text_llm.generate("A number:", SamplingParams(max_tokens=20, structured_outputs=asked))[0].outputs[0].text
    assert isinstance(json.loads(text.removeprefix("<n>").removesuffix("</n>")), int)
