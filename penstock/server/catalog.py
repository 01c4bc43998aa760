"""The models a server has, by name."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config import GIB
from penstock.errors import Busy, InvalidConfig, shown
from penstock.regular import MIB, UnreadableFile, read_regular
from penstock.server.admission import Admission
from penstock.server.config import ANY, ServerConfig
from penstock.server.errors import ApiError
from penstock.server.keys import KeyRing
from penstock.server.model import ServedModel
from penstock.server.process import WORKER
from penstock.server.stand_ins import MAX_NAME_CHARS, stands_in

LOOK_S = 1.0
MAX_PREFIX_BYTES = 4 * MIB
LEAST_IDLE_S = 1.0  # a request has opened its model a little before the model knows of it


class Catalog:
    """The first model is the default: it answers where a body names none, and is unloaded only when told so."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        keep_alive_s: float = math.inf,
        make: Callable[[str, str], ServedModel] | None = None,
        budget_bytes: int | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        """`make` is for models that come later: from a name and what it means. `aliases` are further names of the
        first model; `*` is every name that is no other's."""
        self._aliases = tuple(dict.fromkeys(aliases))
        self._budget_bytes = budget_bytes
        self._models = {model.name: model for model in models}
        self._default = models[0]
        self._keep_alive_s = keep_alive_s
        self._make = make
        self._unloading: asyncio.Task[None] | None = None
        for model in models[1:]:
            model.keep_alive_s = keep_alive_s

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    @property
    def default(self) -> ServedModel:
        return self._default

    @property
    def ready(self) -> bool:
        """The default model answers or was unloaded on purpose, and every other that is loaded answers."""
        engines = [model.engine for model in self if model.engine is not None and model.loaded]
        return (self._default.loaded or self._default.resting) and all(engine.ready for engine in engines)

    @property
    def waits_for(self) -> tuple[str, int]:
        """Why it is not ready, and in how many seconds to ask again."""
        engines = [model.engine for model in self if model.engine is not None and not model.engine.ready]
        worst = max(engines, key=lambda engine: engine.retry_after_s, default=None)
        return ("loading", 1) if worst is None else (worst.state, worst.retry_after_s)

    def find(self, name: str | None, *, is_exact: bool = False) -> ServedModel:
        """The model of that name; an exact one stands for no other."""
        if not name:
            return self._default
        model = self._get(name)
        if model is None and not is_exact and self._takes(name):
            model = self._default
        if model is None:
            raise ApiError(
                404,
                f"the model {shown(name)} does not exist here: the models are "
                f"{', '.join(name for one in self for name in self.names_of(one))}",
                param="model",
                code="model_not_found",
            )
        return model

    def names_of(self, model: ServedModel) -> list[str]:
        """By which it is listed, the first one first."""
        more = self._aliases if model is self._default else ()
        return [model.name, *(name for name in more if name not in (ANY, model.name))]

    def _get(self, name: str) -> ServedModel | None:
        if name in self._models:
            return self._models[name]
        return self._default if name in self._aliases else next((one for one in self if name == one.model), None)

    def _takes(self, name: str) -> bool:
        """The first model answers to some names that nobody gave it."""
        if ANY in self._aliases:
            return len(name) <= MAX_NAME_CHARS
        return len(self._models) == 1 and stands_in(name)

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
        others = sorted((one for one in self if one.loaded and one is not model), key=lambda one: -one.idle_s)
        used, budget = sum(one.num_bytes for one in others), self._budget_bytes
        need = model.num_bytes or model.file_bytes + max((one.facts.kv_cache_bytes for one in others), default=0)
        for other in others:
            if used + need <= budget:
                return
            if not other.busy and other is not self._default:
                used -= other.num_bytes
                await other.close()
        if used and used + need > budget:
            raise Busy(
                f"{model.name} needs about {need / GIB:.2f} GiB, and {used / GIB:.2f} of the budget of "
                f"{budget / GIB:.2f} are in use: try again later, or raise --memory-budget-gb",
                10,
                503,
            )

    def add(self, name: str) -> ServedModel:
        """A further model, loaded on first use."""
        model = self._get(name)
        if model is None:
            if self._make is None:
                raise ApiError(400, "this server takes no further models: restart it with --model for each")
            model = self._models[name] = self._make(name, name)
            model.keep_alive_s = self._keep_alive_s
        return model

    def check_removable(self, model: ServedModel) -> None:
        if model is self._default:
            raise ApiError(
                409,
                f"{model.name} is the server's default model and stays as long as the server runs: "
                "stop the server first",
            )

    async def remove(self, model: ServedModel) -> None:
        self.check_removable(model)
        self._models.pop(model.name, None)
        await model.close()

    async def start(self) -> None:
        await self._default.open()
        self._unloading = asyncio.ensure_future(self._unload_idle())

    async def _unload_idle(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for model in list(self):
                if model.busy:
                    model.touch()
                elif model.loaded and model.idle_s > max(model.keep_alive_s, LEAST_IDLE_S):
                    await model.close()

    async def close(self) -> None:
        if self._unloading is not None:
            self._unloading.cancel()
        await asyncio.gather(*(model.close() for model in self))


def make_catalog(
    models: Mapping[str, str],
    options: Mapping[str, Any],
    config: ServerConfig,
    ring: KeyRing,
    folder: Path,
    command: Sequence[str] = WORKER,
) -> Catalog:
    """`folder` holds the lines to the engines."""

    def make(name: str, model: str) -> ServedModel:
        admission = Admission(
            config.max_queued_requests,
            config.max_queued_tokens,
            ring.weights(),
            policy=options.get("scheduling_policy", "fcfs"),
        )
        own = options if name == next(iter(models)) else {**options, "chat_template": None}
        return ServedModel(
            name,
            model,
            own,
            folder,
            admission,
            hang_s=config.hang_timeout,
            command=command,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            public=public,
        )

    public = [_read(path) for path in config.public_prefix]
    keep_alive_s = math.inf if config.keep_alive is None else config.keep_alive
    budget = None if config.memory_budget_gb is None else int(config.memory_budget_gb * GIB)
    return Catalog(
        [make(name, model) for name, model in models.items()], keep_alive_s, make, budget, config.served_model_name
    )


def _read(path: str) -> str:
    try:
        return read_regular(path, MAX_PREFIX_BYTES).decode()
    except UnreadableFile as error:
        raise InvalidConfig(f"public_prefix {path} cannot be read: {error.reason}") from None
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"public_prefix {path} is not UTF-8 text: {error}; convert it, as iconv does") from None
