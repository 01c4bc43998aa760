"""The prefill server's part: compute the prompts of a request, keep their blocks, and answer nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.engines.replica import MIN_HANDED_OVER, can_hand_over
from penstock.server.http.errors import ApiError
from penstock.text.intake import Prepared
from penstock.text.prompt_encoder import Encoded
from penstock.types import BeamSearchParams, Request, SamplingParams

if TYPE_CHECKING:
    from penstock.server.model import ServedModel
    from penstock.server.observe.trace import Trace

NUM_TOKENS = 2  # that are asked for: the first ends the request, whose blocks are in the store then
NEUTRAL = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
STATUS = 200


class ComputedPrompts(msgspec.Struct, frozen=True):
    """The answer to a router. `num_tokens` is 0 where nothing was worth it, or cannot be handed over."""

    num_tokens: int = 0
    seconds: float = 0.0
    transfer_port: int | None = None  # to fetch the blocks from


class PromptsComputed(ApiError):
    """Ends a request whose prompts are computed, in the place of an answer."""

    def __init__(self, computed: ComputedPrompts) -> None:
        super().__init__(STATUS, "the prompts are computed")
        self.computed = computed

    def response(self, path: str = "") -> Response:
        return Response(msgspec.json.encode({"handed_over": self.computed}), STATUS, media_type="application/json")


def make_prefill(request: Request, longest: int) -> Request | None:
    """Turn a request into one for its prompt alone; None if that is not worth it, or cannot be handed over."""
    num_tokens = len(request.tokens)
    if not can_hand_over(request) or not MIN_HANDED_OVER <= num_tokens <= longest - NUM_TOKENS:
        return None
    return Request(
        id=request.id,
        tokens=request.tokens,
        sampling=NEUTRAL,
        max_tokens=NUM_TOKENS,
        loras=request.loras,
        priority=request.priority,
        salt=request.salt,
        num_public=request.num_public,
        tenant=request.tenant,
        cache_priority=request.cache_priority,
        hand_over=True,
    )


async def compute_prompts(
    model: ServedModel,
    prompts: Sequence[tuple[Encoded, SamplingParams | BeamSearchParams]],
    trace: Trace,
    *,
    salts: Sequence[str],
    deadline_s: float | None,
) -> PromptsComputed:
    """Compute prompts until their blocks are in the store; returns what to raise."""
    requests = [
        model.make_request(encoded, params, Prepared(), salt=salt, tenant=trace.tenant)
        for (encoded, params), salt in zip(prompts, salts)
    ]
    made = (make_prefill(request, model.text.intake.longest) for request in requests)
    flights = [
        InFlightRequest(one, None, None, tenant=trace.tenant, deadline_s=deadline_s, trace=trace, number=number)
        for number, one in enumerate(made)
        if one is not None
    ]
    if not flights:
        return PromptsComputed(ComputedPrompts())
    begin = time.monotonic()
    model.running.submit(*flights)
    try:
        for flight in flights:
            async for _ in flight.items():
                pass
    finally:
        model.running.abort(*(flight for flight in flights if flight.is_open))
    num_tokens = sum(len(flight.request.tokens) for flight in flights)
    trace.num_prompt, trace.num_cached = num_tokens, sum(flight.num_cached for flight in flights)
    ports = {flight.handed_over_at for flight in flights}
    port = ports.pop() if len(ports) == 1 else None
    return PromptsComputed(ComputedPrompts(num_tokens, time.monotonic() - begin, port))
