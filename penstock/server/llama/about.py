"""GET /props, and POST /apply-template and …/input_tokens: what the server is, and how it reads a chat."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.host.version import VERSION
from penstock.server.common.chat_prompt import ChatPrompt
from penstock.server.http.context import cancel_on_disconnect, client_of, json_response, read_body, server_of
from penstock.server.http.keys import sees_all
from penstock.server.llama.body import RANDOM_SEED, format_settings
from penstock.server.model import ServedModel
from penstock.server.openai.chat_body import ChatBody


async def show_properties(request: Request) -> Response:
    """Describe the first model, or the one of `?model=`."""
    model = await server_of(request).catalog.open(request.query_params.get("model"))
    facts, tokenizer = model.facts, model.tokenizer
    max_output = model.text.intake.max_output_tokens
    limit = -1 if max_output is None else max_output
    params: dict[str, Any] = {
        **format_settings(model.defaults),
        "seed": RANDOM_SEED,
        "n_predict": limit,
        "max_tokens": limit,
        "stream": False,
        "timings_per_token": False,
    }
    bos = None if tokenizer is None else tokenizer.bos_token_id
    return json_response(
        {
            "default_generation_settings": {"n_ctx": facts.max_model_len, "params": params},
            "total_slots": facts.max_num_seqs,
            "model_alias": model.name,
            "model_path": str(model.path) if sees_all(request) else model.name,
            "chat_template": (tokenizer.chat_template if tokenizer else None) or "",
            "bos_token": "" if tokenizer is None or bos is None else tokenizer.token_text(bos),
            "eos_token": _find_eos(model),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"penstock {VERSION}",
            "is_sleeping": False,
        }
    )


def _find_eos(model: ServedModel) -> str:
    tokenizer, ids = model.tokenizer, model.text.intake.eos_token_ids
    return tokenizer.token_text(ids[0]) if tokenizer is not None and ids else ""


async def apply_template(request: Request) -> Response:
    chat_prompt = await _read_chat(request)
    return json_response({"prompt": chat_prompt.encoded.prompt or ""})


async def count_input_tokens(request: Request) -> Response:
    chat_prompt = await _read_chat(request)
    return json_response({"object": "response.input_tokens", "input_tokens": len(chat_prompt.encoded.tokens)})


async def _read_chat(request: Request) -> ChatPrompt:
    body = await read_body(request, ChatBody)
    model = await server_of(request).catalog.open(body.model)
    return await cancel_on_disconnect(request, ChatPrompt.prepare(body, model, client_of(request).tenant))
