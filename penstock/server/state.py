"""The server as a whole: its models, metrics and running generations."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from penstock.errors import Busy
from penstock.server.catalog import Catalog
from penstock.server.common.fields import SamplingBody, name_slot
from penstock.server.config import ServerConfig
from penstock.server.engines.in_flight import InFlightRequest
from penstock.server.generation import Generation
from penstock.server.handover.asked import CURRENT_HANDOVER
from penstock.server.handover.prefill import compute_prompts
from penstock.server.http.access import AccessLog
from penstock.server.http.context import Client, new_id
from penstock.server.http.errors import ApiError
from penstock.server.http.identity import Identities
from penstock.server.http.relay import CURRENT_RELAY, Relay
from penstock.server.metrics import Metrics
from penstock.server.model import ServedModel
from penstock.server.observe.live import LiveHub
from penstock.server.observe.request_log import log_requests
from penstock.server.observe.ring import TraceRing
from penstock.server.observe.spans import open_spans
from penstock.server.observe.trace import CURRENT, Trace, stage
from penstock.server.openai.logprobs import check_prompt_logprobs
from penstock.text.intake import Prepared
from penstock.text.prompt_encoder import Encoded
from penstock.types import BeamSearchParams, SamplingParams
from penstock.types import Request as EngineRequest

POLL_S = 0.05
BATCH_PRIORITY = 1 << 30  # of batch requests: behind all others of their tenant
LAST_EVENTS_S = 1.0  # for the last error events


class Server:
    def __init__(self, config: ServerConfig, catalog: Catalog, metrics: Metrics) -> None:
        self.config = config
        self.catalog = catalog
        self.metrics = metrics
        self.access = AccessLog(metrics, config.access_log, self._end_trace)
        self.is_draining = False
        self.begun_s = time.time()
        self.pid = os.getpid()
        self.generations: set[Generation] = set()
        self.traces = TraceRing()
        self._identities = Identities()
        self.live = LiveHub(catalog, metrics, self.traces)
        self.spans = None if config.otlp_traces_endpoint is None else open_spans(config.otlp_traces_endpoint)

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and self.catalog.is_ready

    async def generate(
        self,
        model: ServedModel,
        client: Client,
        body: SamplingBody,
        prompts: Sequence[tuple[Encoded, SamplingParams | BeamSearchParams]],
        *,
        pool: bool = False,
    ) -> Generation:
        """Queue all prompts of a request, or none."""
        trace = self._enter_trace(model, client)
        if (asked := CURRENT_HANDOVER.get()) is not None and asked.is_prefill:
            raise await self._prefill(model, client, body, prompts, trace)
        with stage("grammar") if any(model.text.has_to_prepare(params) for _, params in prompts) else nullcontext():
            prepared = [await model.text.prepare(encoded, params, client.tenant) for encoded, params in prompts]
        if self.is_draining:
            raise Busy("the server is stopping", 5, 503)
        scales = None if body.lora is None else [(one.id, one.scale) for one in body.lora]
        if body.model not in model.loras:
            self.catalog.find(body.model)  # an adapter may have been unloaded meanwhile
        loras = model.loras.resolve(body.model, scales)
        trace.loras = tuple(dict.fromkeys(use.name for use in loras))
        prompts = [(replace(encoded, loras=loras), params) for encoded, params in prompts]
        timeout = body.timeout if body.timeout is not None else self.config.request_timeout
        requests = self._make_requests(model, client, body, list(zip(prompts, prepared)), pool)
        requests = [_retain(request, body) for request in requests]
        if asked is not None:
            trace.taken, requests = asked.taken, asked.take(requests)
        check_prompt_logprobs((request.sampling, len(request.tokens)) for request in requests)
        deadline_s = None if timeout is None else time.monotonic() + timeout
        flights = [
            InFlightRequest(
                request,
                encoded.prompt,
                model.tokenizer,
                tenant=client.tenant,
                deadline_s=deadline_s,
                trace=trace,
                number=number,
            )
            for number, (request, (encoded, _)) in enumerate(zip(requests, prompts))
        ]
        self._note(trace, flights, model)
        held = model.loras.hold(loras)
        if any(request.beam for request in requests):
            CURRENT_RELAY.set(None)  # beams come whole: there is nothing to go on with elsewhere
        if (relay := CURRENT_RELAY.get()) is not None:
            try:
                await self._attach(relay, model, flights)
            except BaseException:
                model.loras.release(held)
                raise
        model.touch()
        if waiting := [flight for flight in flights if flight.is_open]:
            model.running.submit(*waiting)
        generation = Generation(model, flights, self.metrics, self._forget, trace)
        generation.loras = held
        self.generations.add(generation)
        return generation

    def _note(self, trace: Trace, flights: Sequence[InFlightRequest], model: ServedModel) -> None:
        """Begin the ledgers of a request's parts, and log them where that is asked for."""
        for flight in flights:
            flight.collector.engine_applied = model.facts.applied
        if self.config.enable_log_requests:
            log_requests(trace, flights, self.config.max_log_len)

    async def _prefill(
        self,
        model: ServedModel,
        client: Client,
        body: SamplingBody,
        prompts: Sequence[tuple[Encoded, SamplingParams | BeamSearchParams]],
        trace: Trace,
    ) -> ApiError:
        """Compute prompts for another server; returns what ends the request."""
        if self.is_draining:
            raise Busy("the server is stopping", 5, 503)
        scales = None if body.lora is None else [(one.id, one.scale) for one in body.lora]
        loras = model.loras.resolve(body.model, scales)
        held = model.loras.hold(loras)
        model.touch()
        try:
            salted = [(replace(encoded, loras=loras), params) for encoded, params in prompts]
            salts = [make_salt(client.tenant, body.cache_salt or encoded.salt) for encoded, _ in prompts]
            timeout = body.timeout if body.timeout is not None else self.config.request_timeout
            deadline_s = None if timeout is None else time.monotonic() + timeout
            return await compute_prompts(model, salted, trace, salts=salts, deadline_s=deadline_s)
        finally:
            model.loras.release(held)

    def _make_requests(
        self,
        model: ServedModel,
        client: Client,
        body: SamplingBody,
        prompts: Sequence[tuple[tuple[Encoded, SamplingParams | BeamSearchParams], Prepared]],
        pool: bool,
    ) -> list[EngineRequest]:
        requests = [
            model.make_request(
                encoded,
                params,
                prepared,
                priority=BATCH_PRIORITY if client.is_batch else body.priority,
                salt=make_salt(client.tenant, body.cache_salt or encoded.salt),
                pool=pool,
                tenant=client.tenant,
            )
            for (encoded, params), prepared in prompts
        ]
        if (relay := CURRENT_RELAY.get()) is None:
            return requests
        return [
            one if one.sampling.seed is not None else replace(one, seed=relay.seed(number))
            for number, one in enumerate(requests)
        ]

    async def _attach(self, relay: Relay, model: ServedModel, flights: Sequence[InFlightRequest]) -> None:
        """Let a router continue this request elsewhere, or continue one that it lost elsewhere."""
        loras = {use.name: model.loras.get(use.name) for flight in flights for use in flight.request.loras}
        relay.kind = await self._identities.identify(
            model, [one.fingerprint for one in loras.values() if one is not None]
        )
        if relay.resume is not None and relay.resume.kind != relay.kind:
            raise ApiError(
                409, "this stream was begun by another model or version: it cannot go on here", code="other_model"
            )
        await relay.restore(flights)

    def _forget(self, generation: Generation) -> None:
        self.generations.discard(generation)
        if generation.trace.outlives_connection:
            generation.trace.finish(200)
            self._end_trace(generation.trace)

    def _end_trace(self, trace: Trace) -> None:
        self.traces.end(trace)
        if self.spans is not None:
            self.spans.write(trace)

    def _enter_trace(self, model: ServedModel, client: Client) -> Trace:
        trace = CURRENT.get() or Trace(new_id("req_"))
        trace.model, trace.tenant = model.name, client.tenant
        self.traces.enter(trace)
        return trace

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for running ones; True if all ended."""
        self.is_draining = True
        end = time.monotonic() + timeout_s
        while self.generations and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        left = list(self.generations)
        for generation in left:
            generation.fail(Busy("the server stopped before this response was finished", 5, 503))
        while self.generations and time.monotonic() < end + LAST_EVENTS_S:
            await asyncio.sleep(POLL_S)
        self.live.close()
        return not left

    async def close(self) -> None:
        if self.spans is not None:
            spans, self.spans = self.spans, None
            await spans.close()
        await self.catalog.close()


def make_salt(tenant: str, salt: str) -> str:
    """Scope prefix sharing to a tenant and its salt."""
    return f"{len(tenant)}:{tenant}{salt}" if tenant or salt else ""


def _retain(request: EngineRequest, body: SamplingBody) -> EngineRequest:
    """Say how long the cache is to keep a request's prefix."""
    slot = "" if body.id_slot is None or body.id_slot < 0 else name_slot(body.id_slot)
    session = body.session or slot
    if not (session or body.cache_priority):
        return request
    return replace(request, session=session, session_s=body.session_ttl, cache_priority=body.cache_priority)
