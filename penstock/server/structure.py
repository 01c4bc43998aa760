"""What a body says of the answer's form: response_format, structured_outputs and the older guided_* names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.errors import InvalidRequest
from penstock.server.fields import Body
from penstock.types import MAX_STRUCTURE_BYTES, StructuredOutputsParams

MAX_CHOICES = 10_000

Source = Annotated[str, Field(max_length=MAX_STRUCTURE_BYTES)]
Choices = Annotated[list[Source], Field(max_length=MAX_CHOICES)]


class StructuredOutputs(Body):
    """vLLM's; one of them."""

    json_: Source | dict[str, Any] | None = Field(None, alias="json")
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool | None = None
    structural_tag: Source | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    strict: bool | None = None


class JsonSchemaFormat(Body):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's; llama-server gives the schema in `schema`, TGI and huggingface_hub in `value`."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    value: Source | dict[str, Any] | None = None
    # of a structural tag: XGrammar's form, and vLLM's older one
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @property
    def schema_asked(self) -> Source | dict[str, Any] | None:
        """The schema, wherever it stands."""
        if self.json_schema is not None and self.json_schema.schema_ is not None:
            return self.json_schema.schema_
        named = self.value.get("schema") if isinstance(self.value, dict) and self.type == "json_schema" else None
        return self.schema_ or (named if isinstance(named, dict) else self.value)


class StructureBody(Body):
    """The fields that fix an answer's form."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Source | dict[str, Any] | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    # llama-server's
    grammar: Source | None = None
    json_schema: Source | dict[str, Any] | None = None


def structure(body: StructureBody) -> StructuredOutputsParams | None:
    """The one constraint that a body asks for."""
    asked = {
        "response_format": _response_format(body.response_format),
        "structured_outputs": _structured(body),
        **{
            f"guided_{kind}": _loose(**{kind: value})
            for kind in ("json", "regex", "choice", "grammar")
            if (value := getattr(body, f"guided_{kind}")) is not None
        },
    }
    asked |= {
        "grammar": _loose(grammar=body.grammar) if body.grammar else None,
        "json_schema": None if body.json_schema is None else _loose(json=body.json_schema),
    }
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} each fix the answer's form: give one of them")
    return next(iter(given.values()), None)


def _structured(body: StructureBody) -> StructuredOutputsParams | None:
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
    return _loose(
        asked.strict,
        disable_any_whitespace=asked.disable_any_whitespace,
        **{name: value for name, value in values.items() if value is not None},
    )


def _loose(strict: bool | None = None, **values: Any) -> StructuredOutputsParams:
    """A schema may be relaxed unless it is said to be strict, as OpenAI has it."""
    return StructuredOutputsParams(strict=bool(strict), **values)


def _response_format(asked: ResponseFormat | None) -> StructuredOutputsParams | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "regex":
        if not isinstance(asked.value, str):
            raise InvalidRequest("response_format of type regex needs value: give the regular expression")
        return _loose(regex=asked.value)
    if asked.type == "structural_tag":
        tag = asked.model_dump(include={"type", "format", "structures", "triggers"}, exclude_none=True)
        return _loose(structural_tag=tag)
    schema = asked.schema_asked
    if schema is None:
        if asked.type == "json_object":
            return _loose(json_object=True)
        place = "json_schema.schema" if asked.type == "json_schema" else "value"
        raise InvalidRequest(f"response_format of type {asked.type} needs {place}: give the schema")
    return _loose(asked.json_schema.strict if asked.json_schema else None, json=schema)
