"""The models of a server, by name."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config import GIB
from penstock.errors import Busy, InvalidConfig, quote
from penstock.host.files import MIB, UnreadableFile, read_regular
from penstock.server.config import ANY, ServerConfig
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.process import WORKER
from penstock.server.http.errors import ApiError
from penstock.server.http.keys import KeyRing
from penstock.server.loras.modules import FLAG, LoraModule, parse_modules
from penstock.server.model import ServedModel
from penstock.server.observe.trace import stage

MAX_NAME_CHARS = 256  # responses repeat the name
_NAMES = frozenset({"default", "dummy", "local-model", "tgi"})
_PREFIXES = ("babbage-", "chatgpt-", "claude-", "davinci-", "gpt-", "text-davinci-", "text-embedding-")
_O_SERIES = re.compile(r"o[1-9](?:-.*)?")  # OpenAI's o3, o4-mini
_OPEN_WEIGHTS = ("gpt-j", "gpt-neo", "gpt-oss", "gpt-sw3")  # real models that a client may want
POLL_S = 1.0
MAX_PREFIX_BYTES = 4 * MIB
MIN_IDLE_S = 1.0  # a request opens its model slightly before it is queued there


def is_generic_name(name: str) -> bool:
    """True for a name that means whatever model is served."""
    if len(name) > MAX_NAME_CHARS:
        return False
    if name in _NAMES or _O_SERIES.fullmatch(name):
        return True
    return name.startswith(_PREFIXES) and not name.startswith(_OPEN_WEIGHTS)


class Catalog:
    """All models. The first is the default: it serves bodies that name none, and is unloaded only on request."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        keep_alive_s: float = math.inf,
        make: Callable[[str, str], ServedModel] | None = None,
        budget_bytes: int | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        """Collect `models`; `make` adds models later, from a name and a source. `aliases` are further names of the
        first model; `*` matches any unknown name."""
        self._aliases = tuple(dict.fromkeys(aliases))
        self._budget_bytes = budget_bytes
        self._models = {model.name: model for model in models}
        self.default = models[0]
        self._keep_alive_s = keep_alive_s
        self._make = make
        self._unloading: asyncio.Task[None] | None = None
        for model in models[1:]:
            model.keep_alive_s = keep_alive_s

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    @property
    def is_ready(self) -> bool:
        """True if the default model is ready or was unloaded on purpose, and every other loaded model is ready."""
        engines = [model.engine for model in self if model.engine is not None and model.is_loaded]
        return (self.default.is_loaded or self.default.is_unloaded) and all(engine.is_ready for engine in engines)

    @property
    def not_ready_reason(self) -> tuple[str, int]:
        """The reason it is not ready, and the seconds until a retry."""
        engines = [model.engine for model in self if model.engine is not None and not model.engine.is_ready]
        worst = max(engines, key=lambda engine: engine.retry_after_s, default=None)
        return ("loading", 1) if worst is None else (worst.state, worst.retry_after_s)

    @property
    def can_add(self) -> bool:
        return self._make is not None

    @property
    def budget_bytes(self) -> int | None:
        """Memory that all models together may take."""
        return self._budget_bytes

    def find(self, name: str | None, *, is_exact: bool = False) -> ServedModel:
        """Find a model by name; `is_exact` rules out generic names."""
        if not name:
            return self.default
        model = self._get(name)
        if model is None and not is_exact:
            model = self.find_base(name)
        if model is None and not is_exact and self._matches_default(name):
            model = self.default
        if model is None:
            raise ApiError(
                404,
                f"the model {quote(name)} does not exist: the models are "
                f"{', '.join(name for one in self for name in (*self.list_names(one), *one.loras.list_names()))}",
                param="model",
                code="model_not_found",
            )
        return model

    def find_base(self, lora: str | None) -> ServedModel | None:
        """Find the model of an adapter by the adapter's name."""
        return next((one for one in self if lora in one.loras), None)

    def check_free(self, lora: str, base: ServedModel) -> None:
        """Refuse an adapter's name that a model has, or an adapter of a model other than `base`."""
        if self._get(lora) is not None or self.find_base(lora) not in (None, base):
            raise ApiError(400, f"{quote(lora)} is the name of another model: give the adapter another")

    def list_names(self, model: ServedModel) -> list[str]:
        """List a model's names, the main one first."""
        more = self._aliases if model is self.default else ()
        return [model.name, *(name for name in more if name not in (ANY, model.name))]

    def _get(self, name: str) -> ServedModel | None:
        if name in self._models:
            return self._models[name]
        return self.default if name in self._aliases else next((one for one in self if name == one.model), None)

    def _matches_default(self, name: str) -> bool:
        """True for a name that the first model answers to without having been given it."""
        if ANY in self._aliases:
            return len(name) <= MAX_NAME_CHARS
        return len(self._models) == 1 and is_generic_name(name)

    async def open(self, name: str | None) -> ServedModel:
        model = self.find(name)
        if model.is_loaded:
            await model.open()
        else:
            with stage("load", f"{model.name} was loaded"):
                await self._make_room(model)
                await model.open()
        return model

    async def _make_room(self, model: ServedModel) -> None:
        """Unload idle models, least recently used first, until `model` fits the memory budget."""
        if self._budget_bytes is None:
            return
        others = sorted((one for one in self if one.is_loaded and one is not model), key=lambda one: -one.idle_s)
        used, budget = sum(one.num_bytes for one in others), self._budget_bytes
        need = model.num_bytes or model.file_bytes + max((one.facts.kv_cache_bytes for one in others), default=0)
        for other in others:
            if used + need <= budget:
                return
            if not other.is_busy and other is not self.default:
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
        """Add a model, loaded on first use."""
        model = self._get(name)
        if model is None:
            if self._make is None:
                raise ApiError(400, "models cannot be added to this server: restart it with --model for each")
            model = self._models[name] = self._make(name, name)
            model.keep_alive_s = self._keep_alive_s
        return model

    def check_removable(self, model: ServedModel) -> None:
        if model is self.default:
            raise ApiError(
                409, f"{model.name} is the server's default model and cannot be removed: stop the server first"
            )

    async def remove(self, model: ServedModel) -> None:
        self.check_removable(model)
        self._models.pop(model.name, None)
        await model.close()

    async def start(self) -> None:
        await self.default.open()
        self._unloading = asyncio.ensure_future(self._unload_idle())

    async def _unload_idle(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            for model in list(self):
                if model.is_busy:
                    model.touch()
                elif model.is_loaded and model.idle_s > max(model.keep_alive_s, MIN_IDLE_S):
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
    """Make the catalog; `folder` holds the engines' sockets."""

    def make(name: str, model: str) -> ServedModel:
        admission = AdmissionQueue(
            config.max_queued_requests,
            config.max_queued_tokens,
            ring.weights(),
            policy=options.get("scheduling_policy", "fcfs"),
            ttft_s=None if (aim_ms := options.get("ttft_slo_ms")) is None else aim_ms / 1e3,
        )
        own = options if name == next(iter(models)) else {**options, "chat_template": None}
        return ServedModel(name, model, own, folder, admission, config=config, command=command, public=public)

    public = [_read(path) for path in config.public_prefix]
    keep_alive_s = math.inf if config.keep_alive is None else config.keep_alive
    budget = None if config.memory_budget_gb is None else int(config.memory_budget_gb * GIB)
    made = [make(name, model) for name, model in models.items()]
    catalog = Catalog(made, keep_alive_s, make, budget, config.served_model_name)
    _add_modules(catalog, parse_modules(config.lora_modules))
    return catalog


def _add_modules(catalog: Catalog, modules: Iterable[LoraModule]) -> None:
    """Give models the adapters that they begin with."""
    names = {name: model for model in catalog for name in (*catalog.list_names(model), model.model)}
    for module in modules:
        base = catalog.default if module.base is None else names.get(module.base)
        if base is None:
            raise InvalidConfig(f"{FLAG} {quote(module.name)} is for {quote(module.base)}, which is not served")
        if not base.loras.is_enabled:
            raise InvalidConfig(f"{FLAG} {quote(module.name)} needs --enable-lora: set it too")
        if module.name in names:
            raise InvalidConfig(f"{FLAG} {quote(module.name)} is a model's name: give the adapter another")
        base.loras.modules[module.name] = module


def _read(path: str) -> str:
    try:
        return read_regular(path, MAX_PREFIX_BYTES).decode()
    except UnreadableFile as error:
        raise InvalidConfig(f"cannot read public_prefix {path}: {error.reason}") from None
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"public_prefix {path} is not UTF-8: {error}; convert it, as iconv does") from None
