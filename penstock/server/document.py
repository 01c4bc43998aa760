"""The OpenAPI document: FastAPI's, with the bodies, streams and errors that its routes do not tell it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

SCHEMAS = "#/components/schemas/"
PLAIN = ("/metrics",)  # answers with text
OTHERS = ("/v1/messages", "/api/", "/generate")  # APIs with errors of another shape
ERROR = {
    "type": "object",
    "title": "Error",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def described(body: type[BaseModel]) -> dict[str, Any]:
    """What a route that reads a body takes, and whether it may answer with a stream."""
    told: dict[str, Any] = {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": SCHEMAS + body.__name__}}},
        }
    }
    if "stream" in body.model_json_schema()["properties"]:
        told["responses"] = {"200": {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
    return told


def document(app: FastAPI, bodies: Iterable[type[BaseModel]]) -> dict[str, Any]:
    if app.openapi_schema is None:
        made = FastAPI.openapi(app)
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = ERROR
        read: list[tuple[type[BaseModel], Literal["validation"]]] = [(body, "validation") for body in bodies]
        schemas |= models_json_schema(read, ref_template=SCHEMAS + "{model}")[1]["$defs"]  # of one name may be two
        for path, methods in made["paths"].items():
            for operation in methods.values():
                _complete(path, operation)
        app.openapi_schema = made
    return app.openapi_schema


def _complete(path: str, operation: dict[str, Any]) -> None:
    error = {"type": "object"} if path.startswith(OTHERS) else {"$ref": SCHEMAS + "Error"}
    operation["responses"]["4XX"] = {"description": "Refused", "content": {"application/json": {"schema": error}}}
    if path in PLAIN:
        operation["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
