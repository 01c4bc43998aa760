"""Build the OpenAPI document (FastAPI's, plus bodies, streams and errors), and serve /docs with bundled scripts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.http.errors import LLAMA_PATHS, ApiError

SCHEMAS = "#/components/schemas/"
TEXT_ROUTES = ("/metrics",)  # plain text
OTHER_ERRORS = ("/v1/messages", "/api/", "/generate", *LLAMA_PATHS)  # APIs with their own error format
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
ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}


def describe_body(body: type[BaseModel]) -> dict[str, Any]:
    """Describe a route's body, and its stream if it may send one."""
    operation: dict[str, Any] = {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": SCHEMAS + body.__name__}}},
        }
    }
    if "stream" in body.model_json_schema().get("properties", ()):
        operation["responses"] = {"200": {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
    return operation


def make_document(app: FastAPI, bodies: Iterable[type[BaseModel]]) -> dict[str, Any]:
    if app.openapi_schema is None:
        made = FastAPI.openapi(app)
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = ERROR
        read: list[tuple[type[BaseModel], Literal["validation"]]] = [(body, "validation") for body in bodies]
        schemas |= models_json_schema(read, ref_template=SCHEMAS + "{model}")[1]["$defs"]  # names may repeat
        for path, methods in made["paths"].items():
            for operation in methods.values():
                _complete(path, operation)
        app.openapi_schema = made
    return app.openapi_schema


def _complete(path: str, operation: dict[str, Any]) -> None:
    error = {"type": "object"} if path.startswith(OTHER_ERRORS) else {"$ref": SCHEMAS + "Error"}
    operation["responses"]["4XX"] = {"description": "Refused", "content": {"application/json": {"schema": error}}}
    if path in TEXT_ROUTES:
        operation["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]


async def docs(request: Request) -> Response:
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="Penstock",
        swagger_favicon_url="data:,",
        swagger_js_url="/docs/swagger-ui-bundle.js",
        swagger_css_url="/docs/swagger-ui.css",
    )
    page.headers["Content-Security-Policy"] = "frame-ancestors 'none'"  # no clickjacking
    return page


async def asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ASSETS:
        raise ApiError(404, f"/docs has no file {name[:80]!r}", code="not_found")
    content = files("fastapi_offline").joinpath("static").joinpath(name).read_bytes()
    return Response(content, media_type=ASSETS[name], headers={"Cache-Control": "max-age=86400"})
