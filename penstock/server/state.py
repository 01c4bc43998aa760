"""The server as a whole: its models, its clients, its figures, and whether it still takes requests."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from penstock.errors import Busy
from penstock.intake import Encoded
from penstock.server.access import Access
from penstock.server.catalog import Catalog
from penstock.server.config import ServerConfig
from penstock.server.context import Client
from penstock.server.fields import SamplingBody
from penstock.server.flight import Flight
from penstock.server.generation import Generation
from penstock.server.logprobs import check_prompt_logprobs
from penstock.server.metrics import Metrics
from penstock.server.model import ServedModel
from penstock.types import SamplingParams

DRAIN_S = 0.05
BATCH_PRIORITY = 1 << 30  # of a batch's requests: behind what others of their tenant wait for
LAST_EVENTS_S = 1.0  # for the error events of answers that were cut off


class Server:
    def __init__(self, config: ServerConfig, catalog: Catalog, metrics: Metrics) -> None:
        self.config = config
        self.catalog = catalog
        self.metrics = metrics
        self.access = Access(metrics, config.access_log)
        self.draining = False
        self.begun_s = time.time()
        self.pid = os.getpid()
        self.generations: set[Generation] = set()

    @property
    def ready(self) -> bool:
        return not self.draining and self.catalog.ready

    async def generate(
        self,
        model: ServedModel,
        client: Client,
        body: SamplingBody,
        prompts: Sequence[tuple[Encoded, SamplingParams]],
        *,
        pool: bool = False,
    ) -> Generation:
        """Queue all prompts of a request, or none of them."""
        prepared = [await model.prepare(encoded, params, client.tenant) for encoded, params in prompts]
        if self.draining:
            raise Busy("the server is stopping and takes no more requests", 5, 503)
        timeout = body.timeout if body.timeout is not None else self.config.request_timeout
        requests = [
            model.request(
                encoded,
                params,
                ready,
                priority=BATCH_PRIORITY if client.is_batch else body.priority,
                salt=_salt(client.tenant, body.cache_salt or encoded.salt),
                pool=pool,
                tenant=client.tenant,
            )
            for (encoded, params), ready in zip(prompts, prepared)
        ]
        check_prompt_logprobs((request.sampling, len(request.tokens)) for request in requests)
        deadline_s = None if timeout is None else time.monotonic() + timeout
        flights = [
            Flight(request, encoded.prompt, model.tokenizer, tenant=client.tenant, deadline_s=deadline_s)
            for request, (encoded, _) in zip(requests, prompts)
        ]
        model.touch()
        model.running.submit(*flights)
        return Generation(model, flights, self)

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait for those that run; whether all of them ended."""
        self.draining = True
        end = time.monotonic() + timeout_s
        while self.generations and time.monotonic() < end:
            await asyncio.sleep(DRAIN_S)
        left = list(self.generations)
        for generation in left:
            generation.fail(Busy("the server was stopped before this answer was finished", 5, 503))
        while self.generations and time.monotonic() < end + LAST_EVENTS_S:
            await asyncio.sleep(DRAIN_S)
        return not left

    async def close(self) -> None:
        await self.catalog.close()


def _salt(tenant: str, salt: str) -> str:
    """Prefixes are shared within a tenant, and there within a salt."""
    return f"{len(tenant)}:{tenant}{salt}" if tenant or salt else ""
