"""The adapters of one model: by name, with who uses them, and told to each of its engines."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from penstock.engine.messages import Answer, DropLora, LoadLora
from penstock.errors import InvalidModel, InvalidRequest, PenstockError, quote
from penstock.server.loras.modules import FLAG, LoraModule
from penstock.types import LoraUse

OFF = "LoRA is off: start the server with --enable-lora"
log = logging.getLogger("penstock.server")
Ask = Callable[[object], Awaitable[Answer]]  # a control message, of the engine
Done = TypeVar("Done")
Scales = Sequence[tuple[int, float]]  # adapters by id, as llama-server names them


@dataclass(eq=False)
class ServedLora:
    """An adapter in one version: loading its name again makes another, with a number of its own."""

    name: str
    path: str
    number: int
    fingerprint: str = ""
    rank: int = 0
    num_bytes: int = 0
    scale: float = 0.0  # in requests that ask for no adapters
    num_users: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def id(self) -> int:
        return self.number - 1


class LoraRegistry:
    """It survives the model's engines: each is told all adapters before its first request."""

    def __init__(self, ask: Ask, *, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self.modules: dict[str, LoraModule] = {}  # that the model begins with, until they are loaded
        self._ask = ask
        self._numbers = count(1)
        self._loras: dict[str, ServedLora] = {}
        self._retired: set[ServedLora] = set()  # unloaded or replaced, and still in use
        self._arriving: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[ServedLora]:
        return iter(self._loras.values())

    def __contains__(self, name: object) -> bool:
        return name in self._loras or name in self.modules

    def list_names(self) -> list[str]:
        return list(dict.fromkeys((*self.modules, *self._loras)))

    def get(self, name: str | None) -> ServedLora | None:
        return self._loras.get(name) if name else None

    def list_messages(self) -> list[object]:
        """List what an engine must know before the requests. It reads an adapter when the first of them runs."""
        return [LoadLora(one.number, one.path, one.fingerprint, one.rank) for one in (*self, *self._retired)]

    async def load_modules(self) -> None:
        """Load the adapters that the model begins with, when it is loaded for the first time."""
        for name, module in list(self.modules.items()):
            try:
                await self.load(name, module.path)
            except InvalidRequest as error:
                raise InvalidModel(f"{FLAG} {name}: {error}") from None
            del self.modules[name]

    async def load(self, name: str, path: str, *, in_place: bool = False) -> ServedLora:
        """Read and check an adapter. `in_place` replaces one of the same name: running requests keep the old."""
        if not self.is_enabled:
            raise InvalidRequest(OFF)
        if name in self._arriving:
            raise InvalidRequest(f"the adapter {quote(name)} is being loaded: wait for it")
        if name in self._loras and not in_place:
            raise InvalidRequest(
                f"the adapter {quote(name)} is already loaded: unload it first, or set load_inplace=true to replace it"
            )
        self._arriving.add(name)
        return await self._run(self._load(name, os.path.abspath(os.path.expanduser(path))))

    async def _load(self, name: str, path: str) -> ServedLora:
        lora = ServedLora(name, path, next(self._numbers))
        try:
            answer = await self._ask(LoadLora(lora.number, path))
        finally:
            self._arriving.discard(name)
        if answer.error is not None:
            raise InvalidRequest(answer.error)
        lora.fingerprint = str(answer.values["fingerprint"])
        lora.rank, lora.num_bytes = int(answer.values["rank"]), int(answer.values["num_bytes"])
        before = self._loras.get(name)
        self._loras[name] = lora
        if before is not None:
            lora.scale = before.scale
            self._retired.add(before)
            self._start(self._free(before))
        log.info("adapter %s is loaded from %s: rank %d, %d bytes", quote(name), path, lora.rank, lora.num_bytes)
        return lora

    async def unload(self, name: str) -> None:
        """Take an adapter from new requests, wait for those that use it, and free it."""
        lora = self._loras.pop(name)
        self._retired.add(lora)
        await self._run(self._free(lora))

    async def _free(self, lora: ServedLora) -> None:
        await lora.idle.wait()
        self._retired.discard(lora)
        try:
            error = (await self._ask(DropLora(lora.number))).error
        except PenstockError:  # freed with the engine that had it
            error = None
        if error is not None:
            log.error("adapter %s was not freed: %s", quote(lora.name), error)
        log.info("adapter %s is unloaded", quote(lora.name))

    async def _run(self, work: Coroutine[Any, Any, Done]) -> Done:
        """Finish work whoever waits for it."""
        return await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, Done]) -> asyncio.Task[Done]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def resolve(self, name: str | None, asked: Scales | None = None) -> tuple[LoraUse, ...]:
        """Return the adapters of a request that names `name` as its model, or `asked` by their ids."""
        named = self.get(name)
        if asked is None:
            scales = [(one, one.scale) for one in self] if named is None else [(named, 1.0)]
        elif not self.is_enabled:
            raise InvalidRequest(OFF)
        elif named is not None:
            raise InvalidRequest(f"model names the adapter {quote(name)}, and lora others: give one of them")
        else:
            scales = [(self.find_id(id), scale) for id, scale in asked]
        return tuple(LoraUse(one.name, one.number, float(scale)) for one, scale in scales if scale)

    def find_id(self, id: int) -> ServedLora:
        found = next((one for one in self if one.id == id), None)
        if found is None:
            raise InvalidRequest(f"there is no adapter of id {id}: GET /lora-adapters lists them")
        return found

    def set_scales(self, scales: Scales) -> None:
        """Set the scales of requests that ask for no adapters; 0 for those not named."""
        chosen = {self.find_id(id).id: scale for id, scale in scales}
        for one in self:
            one.scale = chosen.get(one.id, 0.0)

    def hold(self, uses: Iterable[LoraUse]) -> list[ServedLora]:
        """Keep a request's adapters until `release`."""
        by_number = {one.number: one for one in self}
        held = [by_number[use.number] for use in uses]
        for one in held:
            one.num_users += 1
            one.idle.clear()
        return held

    def release(self, held: Iterable[ServedLora]) -> None:
        for one in held:
            one.num_users -= 1
            if not one.num_users:
                one.idle.set()


def describe(lora: ServedLora) -> dict[str, object]:
    """Format an adapter for those who may see paths."""
    return {
        "name": lora.name,
        "id": lora.id,
        "path": lora.path,
        "rank": lora.rank,
        "num_bytes": lora.num_bytes,
        "scale": lora.scale,
        "num_requests": lora.num_users,
    }
