"""Read output constraints: response_format, structured_outputs, and the older guided_* fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.errors import InvalidRequest
from penstock.server.common.fields import RequestBody
from penstock.types import MAX_STRUCTURE_BYTES, StructuredOutputsParams

MAX_CHOICES = 10_000

Source = Annotated[str, Field(max_length=MAX_STRUCTURE_BYTES)]
Choices = Annotated[list[Source], Field(max_length=MAX_CHOICES)]


class StructuredOutputs(RequestBody):
    """vLLM's structured_outputs; exactly one constraint is set."""

    json_: Source | dict[str, Any] | None = Field(None, alias="json")
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool | None = None
    structural_tag: Source | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    strict: bool | None = None


class JsonSchemaFormat(RequestBody):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """OpenAI's response_format; llama-server puts the schema in `schema`, TGI and huggingface_hub in `value`."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    value: Source | dict[str, Any] | None = None
    # structural tags: XGrammar's format, then vLLM's older one
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @property
    def requested_schema(self) -> Source | dict[str, Any] | None:
        """The schema, from whichever field has it."""
        if self.json_schema is not None and self.json_schema.schema_ is not None:
            return self.json_schema.schema_
        named = self.value.get("schema") if isinstance(self.value, dict) and self.type == "json_schema" else None
        return self.schema_ or (named if isinstance(named, dict) else self.value)


class StructuredOutputsBody(RequestBody):
    """Fields that constrain the output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Source | dict[str, Any] | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    # llama-server's
    grammar: Source | None = None
    json_schema: Source | dict[str, Any] | None = None
    # SGLang's
    regex: Source | None = None
    ebnf: Source | None = None


def read_constraint(body: StructuredOutputsBody) -> StructuredOutputsParams | None:
    """Return the constraint that a body sets; InvalidRequest for more than one."""
    asked = {
        "response_format": _read_response_format(body.response_format),
        "structured_outputs": _read_structured_outputs(body),
        **{
            f"guided_{kind}": _make_params(**{kind: value})
            for kind in ("json", "regex", "choice", "grammar")
            if (value := getattr(body, f"guided_{kind}")) is not None
        },
    }
    asked |= {
        "grammar": _make_params(grammar=body.grammar) if body.grammar else None,
        "json_schema": None if body.json_schema is None else _make_params(json=body.json_schema),
        "regex": None if body.regex is None else _make_params(regex=body.regex),
        "ebnf": None if body.ebnf is None else _make_params(grammar=body.ebnf),
    }
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} each constrain the output: give one of them")
    return next(iter(given.values()), None)


def _read_structured_outputs(body: StructuredOutputsBody) -> StructuredOutputsParams | None:
    asked = body.structured_outputs
    if asked is None:
        return None
    values: dict[str, Any] = {
        "json": asked.json_,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
        "json_object": asked.json_object,
        "structural_tag": asked.structural_tag,
    }
    return _make_params(
        asked.strict,
        disable_any_whitespace=asked.disable_any_whitespace,
        **{name: value for name, value in values.items() if value is not None},
    )


def _make_params(strict: bool | None = None, **values: Any) -> StructuredOutputsParams:
    """Make the parameters; a schema may be relaxed unless it is strict, as with OpenAI."""
    return StructuredOutputsParams(strict=bool(strict), **values)


def _read_response_format(response_format: ResponseFormat | None) -> StructuredOutputsParams | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "regex":
        if not isinstance(response_format.value, str):
            raise InvalidRequest("response_format of type regex needs value: give the regular expression")
        return _make_params(regex=response_format.value)
    if response_format.type == "structural_tag":
        tag = response_format.model_dump(include={"type", "format", "structures", "triggers"}, exclude_none=True)
        return _make_params(structural_tag=tag)
    schema = response_format.requested_schema
    if schema is None:
        if response_format.type == "json_object":
            return _make_params(json_object=True)
        place = "json_schema.schema" if response_format.type == "json_schema" else "value"
        raise InvalidRequest(f"response_format of type {response_format.type} needs {place}: give the schema")
    return _make_params(response_format.json_schema.strict if response_format.json_schema else None, json=schema)
