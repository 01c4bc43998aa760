"""The models a server has, by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from penstock.config import GIB
from penstock.errors import Busy
from penstock.server.errors import ApiError
from penstock.server.model import ServedModel

LOOK_S = 1.0


class Catalog:
    """The first model is the default: it answers where a body names none, and is never unloaded."""

    def __init__(self, models: Sequence[ServedModel], keep_alive_s: float | None = None,
                 budget_bytes: int | None = None) -> None:
        self._budget_bytes = budget_bytes
        self._models = {model.name: model for model in models}
        self._default = models[0]
        self._keep_alive_s = keep_alive_s
        self._unloading: asyncio.Task[None] | None = None

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    @property
    def default(self) -> ServedModel:
        return self._default

    @property
    def ready(self) -> bool:
        """The default model answers, and so does every other that is loaded."""
        engines = [model.engine for model in self if model.engine is not None and model.loaded]
        return self._default.loaded and all(engine.ready for engine in engines)

    def find(self, name: str | None) -> ServedModel:
        if not name:
            return self._default
        model = self._models.get(name) or next((one for one in self if name == one.model), None)
        if model is None:
            raise ApiError(404, f"the model {name!r} does not exist here: the models are {', '.join(self._models)}",
                           param="model", code="model_not_found")
        return model

    async def open(self, name: str | None) -> ServedModel:
        """The model of that name, loaded first if it is not."""
        model = self.find(name)
        if not model.loaded:
            await self._make_room(model)
        await model.open()
        return model

    async def _make_room(self, model: ServedModel) -> None:
        """Unload idle models, the longest unused first, until this one fits into the budget."""
        if self._budget_bytes is None:
            return
        others = sorted((one for one in self if one.loaded and one is not model), key=lambda one: one.used_s)
        used, budget = sum(one.num_bytes for one in others), self._budget_bytes
        need = model.num_bytes or model.file_bytes + max((one.facts.kv_cache_bytes for one in others), default=0)
        for other in others:
            if used + need <= budget:
                return
            if other.idle and other is not self._default:
                used -= other.num_bytes
                await other.close()
        if used and used + need > budget:
            raise Busy(f"{model.name} needs about {need / GIB:.2f} GiB, and {used / GIB:.2f} of the budget of "
                       f"{budget / GIB:.2f} are in use: try again later, or raise --memory-budget-gb", 10, 503)

    async def start(self) -> None:
        await self._default.open()
        if self._keep_alive_s is not None:
            self._unloading = asyncio.ensure_future(self._unload_idle(self._keep_alive_s))

    async def _unload_idle(self, keep_alive_s: float) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for model in self:
                if model is self._default or not model.loaded:
                    continue
                if model.idle and time.monotonic() - model.used_s > keep_alive_s:
                    await model.close()

    async def close(self) -> None:
        if self._unloading is not None:
            self._unloading.cancel()
        await asyncio.gather(*(model.close() for model in self))
