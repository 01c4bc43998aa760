"""Load, unload and list adapters: vLLM's routes and llama-server's."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, Field, RootModel
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import quote
from penstock.server.catalog import MAX_NAME_CHARS
from penstock.server.common.fields import Loras, RequestBody
from penstock.server.http.context import Handler, client_of, json_response, read_body, server_of
from penstock.server.http.errors import ApiError
from penstock.server.http.keys import admin_only, sees_all

MAX_PATH_CHARS = 4096
CONFIG = "adapter_config.json"  # peft's


class LoadLoraBody(RequestBody):
    """vLLM's, with the model it is for where there are several."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    lora_path: str = Field(min_length=1, max_length=MAX_PATH_CHARS, pattern="^[^\\x00]*$")
    load_inplace: bool = False
    base_model_name: str | None = Field(None, max_length=MAX_NAME_CHARS)


class UnloadLoraBody(RequestBody):
    lora_name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    lora_int_id: int | None = None  # no effect: names are unique


class LoraScalesBody(RootModel[Loras]):
    """llama-server's: the adapters of requests that name none, each with its scale."""


async def load_adapter(request: Request) -> Response:
    """Load an adapter from a folder on the server's machine; from then on it is a model's name."""
    body = await read_body(request, LoadLoraBody)
    catalog = server_of(request).catalog
    base = await catalog.open(body.base_model_name)
    catalog.check_free(body.lora_name, base)
    if not has_adapter(body.lora_path):
        raise ApiError(
            404,
            f"no adapter found at {quote(body.lora_path)}: name a folder with an {CONFIG}, or a GGUF file, on the "
            "server's machine",
            param="lora_path",
        )
    await base.loras.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
    return _succeed(f"Success: LoRA adapter {body.lora_name!r} added successfully.")


def has_adapter(path: str) -> bool:
    """Return True for a folder with a config, or a GGUF file."""
    expanded = Path(os.path.expanduser(path))
    return expanded.is_file() if expanded.suffix == ".gguf" else (expanded / CONFIG).is_file()


async def unload_adapter(request: Request) -> Response:
    """Unload an adapter: new requests do not find it, and the answer comes once no running one uses it."""
    body = await read_body(request, UnloadLoraBody)
    base = server_of(request).catalog.find_base(body.lora_name)
    if base is None or base.loras.get(body.lora_name) is None:
        raise ApiError(
            404, f"there is no adapter {quote(body.lora_name)}: GET /v1/models lists them", param="lora_name"
        )
    await base.loras.unload(body.lora_name)
    return _succeed(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")


def _succeed(text: str) -> Response:
    return Response(text, media_type="text/plain; charset=utf-8")


async def list_adapters(request: Request) -> Response:
    """List the first model's adapters by id, with their scales in requests that name none."""
    shows_paths = sees_all(request)
    return json_response(
        [
            {"id": one.id, "name": one.name, "path": one.path if shows_paths else one.name, "scale": one.scale}
            for one in server_of(request).catalog.default.loras
        ]
    )


async def set_scales(request: Request) -> Response:
    """Set the scales of requests that name no adapter. It concerns the whole server, so only an admin may."""
    if not client_of(request).is_admin:
        raise admin_only()
    body = await read_body(request, LoraScalesBody)
    server_of(request).catalog.default.loras.set_scales([(one.id, one.scale) for one in body.root])
    return json_response({"success": True})


TAG = "adapters"
READS: list[tuple[str, Handler, str]] = [("/lora-adapters", list_adapters, TAG)]
WRITES: list[tuple[str, Handler, type[BaseModel] | None, str]] = [
    ("/v1/load_lora_adapter", load_adapter, LoadLoraBody, TAG),
    ("/v1/unload_lora_adapter", unload_adapter, UnloadLoraBody, TAG),
    ("/lora-adapters", set_scales, LoraScalesBody, TAG),
]
