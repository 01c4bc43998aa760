"""Log prompts and parameters of requests: only where `enable_log_requests` asks for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.http.log import ACCESS, FIELDS
from penstock.server.observe.trace import Trace
from penstock.types import BeamSearchParams, SamplingParams

_log = logging.getLogger(ACCESS)  # its lines never hold a request up


def log_requests(trace: Trace, flights: Sequence[InFlightRequest], max_length: int | None) -> None:
    """Write a line for each prompt; `max_length` cuts its characters, or its ids where it came as ids."""
    for flight in flights:
        request = flight.request
        text = flight.collector.prompt
        prompt = list(request.tokens)[:max_length] if text is None else text[:max_length]
        entry = {
            "request_id": trace.id,
            "model": trace.model,
            "tenant": trace.tenant,
            "prompt": prompt,
            "prompt_tokens": len(request.tokens),
            "parameters": {} if request.pool else describe_params(request.beam or request.sampling),
        }
        line = f"request {trace.id}: prompt {prompt!r}, {len(request.tokens)} tokens, parameters {entry['parameters']}"
        _log.info("%s", line, extra={FIELDS: entry})


def describe_params(params: SamplingParams | BeamSearchParams) -> dict[str, Any]:
    """Return the parameters that are not at their defaults."""
    default = type(params)() if isinstance(params, SamplingParams) else None
    found = {field.name: getattr(params, field.name) for field in fields(params) if not field.name.startswith("_")}
    return {
        name: value if isinstance(value, int | float | str | None) else repr(value)
        for name, value in found.items()
        if default is None or value != getattr(default, name)
    }
