"""The description at /openapi.json: every route's body, and no two bodies under one name."""

from __future__ import annotations

import json
import re

import httpx

from penstock.server.app import WRITES
from penstock.server.openai.chat_body import REFUSED, ChatBody
from tests.server.running import RunningServer


def test_every_body_is_described(server: RunningServer) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, _, body, _ in WRITES:
        if body is not None:
            content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            assert content["schema"] == {"$ref": f"#/components/schemas/{body.__name__}"}
            fields = {field.alias or name for name, field in body.model_fields.items()}
            shown = set(schemas[body.__name__].get("properties", ()))
            assert shown <= fields and (body is not ChatBody or fields - set(REFUSED) == shown)
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)):
        assert name in schemas


def test_tools_of_different_dialects_are_told_apart(server: RunningServer) -> None:
    schemas = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]

    def tool(body: str) -> dict[str, object]:
        listed = next(one for one in schemas[body]["properties"]["tools"]["anyOf"] if one.get("type") == "array")
        found: dict[str, object] = schemas[listed["items"]["$ref"].rsplit("/", 1)[1]]["properties"]
        return found

    assert "function" in tool("ChatBody") and "input_schema" in tool("MessagesBody")
    assert "parameters" in tool("ResponsesBody")
