"""One model as the API process knows it: its names, its engine, its tokenizer, and what it takes in."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from penstock.engine.messages import Found, Ready
from penstock.errors import EngineFailed, InvalidRequest
from penstock.intake import Encoded, Intake, Messages, Prompt, default_params
from penstock.server.admission import Admission
from penstock.server.engine import RemoteEngine
from penstock.server.flight import Flight
from penstock.server.process import WORKER
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.types import Request, SamplingParams, StructuredOutputsParams
from penstock.version import VERSION

Made = TypeVar("Made")
SHORT = 4096            # characters of text that are encoded at once; more go to another thread


class _CompiledThere:
    """Grammars are compiled, and refused, by the engine."""

    def compile(self, asked: StructuredOutputsParams) -> None:
        return None


class ServedModel:
    """Opened on first use; `open` may be called any number of times."""

    def __init__(self, name: str, model: str, options: Mapping[str, Any], folder: Path, admission: Admission, *,
                 hang_s: float, command: Sequence[str] = WORKER, tool_call_parser: str | None = None,
                 reasoning_parser: str | None = None, public: Sequence[str] = ()) -> None:
        self.name, self.model = name, model
        self.tool_call_parser, self.reasoning_parser = tool_call_parser, reasoning_parser
        self.created = int(time.time())
        self._num_bytes = 0
        self._public_texts = tuple(public)
        self._public: list[list[int]] = []          # token ids that all tenants share as prefixes
        self._used_s = time.monotonic()
        self.keep_alive_s = math.inf                # idle time after which it is unloaded
        self.resting = False                        # unloaded, to be loaded again when it is asked for
        self._make_engine = partial(RemoteEngine, name, model, options, folder, admission, hang_s=hang_s,
                                    command=command, on_found=self._found)
        self.admission = admission
        self.engine: RemoteEngine | None = None
        self.path: Path | None = None
        self._seed = options.get("seed")
        self._task: asyncio.Task[None] | None = None
        self._tokenizer: asyncio.Future[Tokenizer] | None = None
        self._ready: asyncio.Task[None] | None = None
        self.tokenizer: Tokenizer | None = None
        self.intake: Intake | None = None
        self.defaults = SamplingParams()

    # life

    @property
    def loaded(self) -> bool:
        return self.intake is not None and self.engine is not None and self.engine.failure is None

    @property
    def busy(self) -> bool:
        return self.engine is not None and self.engine.busy

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._used_s

    def touch(self) -> None:
        """It is in use now."""
        self._used_s = time.monotonic()

    async def open(self) -> None:
        """Load the model unless it is loaded, and wait for it."""
        self.resting = False
        if self._ready is None or self._ready.done() and (self._ready.cancelled() or self._ready.exception()):
            self.engine = self._make_engine()
            self._task = asyncio.ensure_future(self.engine.run())
            self._ready = asyncio.ensure_future(self._prepare(self.engine))
        await asyncio.shield(self._ready)
        self.touch()
        if self.engine is not None and self.engine.failure:
            raise EngineFailed(self.engine.failure)

    async def _prepare(self, engine: RemoteEngine) -> None:
        facts = await engine.loaded()
        self.tokenizer = await self._tokenizer if self._tokenizer else None
        seed = self._seed if self._seed is not None else int.from_bytes(os.urandom(8), "little")
        self.intake = Intake(self.tokenizer, facts.vocab_size, facts.max_model_len, facts.kv_cache_tokens,
                             facts.generation_config, seed, _CompiledThere() if self.tokenizer else None)
        self._public = [tokens for text in self._public_texts for tokens in self._public_tokens(text)]
        self.defaults = default_params(facts.generation_config).clone(max_tokens=None)

    def _public_tokens(self, text: str) -> Iterator[list[int]]:
        """A declared text as a prompt begins with it: as it stands, and as the chat template's system message."""
        if self.tokenizer is None:
            return
        yield self.tokenizer.encode(text)
        if self.tokenizer.chat_template is not None:
            with contextlib.suppress(InvalidRequest):       # a template may want a user too
                shown = self.tokenizer.apply_chat_template([{"role": "system", "content": text}], False)
                yield self.tokenizer.encode(shown, add_special_tokens=False)

    def _num_public(self, tokens: Sequence[int]) -> int:
        return max((_common(public, tokens) for public in self._public), default=0)

    def _found(self, found: Found) -> None:
        self.path = Path(found.path)
        if self._tokenizer is None:
            source = found.metadata if found.metadata is not None else found.folder or ""
            self._tokenizer = asyncio.ensure_future(asyncio.to_thread(load_tokenizer, source, found.path))

    async def close(self) -> None:
        engine, self.engine, self.intake, self._ready = self.engine, None, None, None
        task, self._task = self._task, None
        self.resting = True
        if engine is not None:
            await engine.close()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    @property
    def num_bytes(self) -> int:
        """Of weights and cache, once it has been loaded; 0 before."""
        if self.loaded:
            self._num_bytes = self.facts.num_bytes + self.facts.kv_cache_bytes
        return self._num_bytes

    @property
    def file_bytes(self) -> int:
        path = self.path or Path(self.model)
        files = path.glob("*.safetensors") if path.is_dir() else [path] if path.is_file() else []
        return sum(file.stat().st_size for file in files)

    @property
    def running(self) -> RemoteEngine:
        if self.engine is None:
            raise EngineFailed(f"{self.name} is not loaded")
        return self.engine

    @property
    def facts(self) -> Ready:
        facts = self.running.facts
        if facts is None:
            raise EngineFailed(f"{self.name} is still being loaded")
        return facts

    @property
    def taking(self) -> Intake:
        if self.intake is None:
            raise EngineFailed(f"{self.name} is not loaded")
        return self.intake

    @property
    def fingerprint(self) -> str:
        """Equal for equal weights and settings, as far as the API process knows them."""
        facts = self.facts
        told = f"{VERSION}:{self.path}:{facts.num_bytes}:{facts.settings}"
        return "fp_" + hashlib.blake2b(told.encode(), digest_size=6).hexdigest()

    # text

    async def encode(self, prompt: Prompt, *, cut: bool = False, add_special_tokens: bool = True) -> Encoded:
        size = len(prompt) if isinstance(prompt, str) else 0
        return await _aside(size, lambda: self.taking.encode(prompt, cut=cut, add_special_tokens=add_special_tokens))

    async def encode_messages(self, messages: Messages, values: Mapping[str, Any], *, cut: bool = False) -> Encoded:
        size = sum(len(str(message.get("content") or "")) for message in messages)
        return await _aside(size, lambda: self.taking.encode_messages(messages, values, cut=cut))

    async def tokens_of(self, text: str, add_special_tokens: bool) -> list[int]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidRequest(f"{self.name} was loaded without a tokenizer")
        return await _aside(len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    # requests

    def request(self, encoded: Encoded, params: SamplingParams, *, priority: int = 0, salt: str = "",
                pool: bool = False) -> Request:
        if pool != self.facts.is_encoder:
            raise InvalidRequest(f"{self.name} " + (
                "generates text and makes no embeddings: use an embedding model" if pool else
                "is an embedding model and generates no text: use /v1/embeddings"))
        num_public = self._num_public(encoded.tokens) if salt and not pool else 0
        return self.taking.request(encoded.tokens, params, priority=priority, salt=salt, num_public=num_public,
                                   pool=pool)

    def submit(self, request: Request, prompt: str | None, *, tenant: str = "", timeout_s: float | None = None,
               ) -> Flight:
        """Queue a request; what it says comes from the flight."""
        self.touch()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        flight = Flight(request, prompt, self.tokenizer, tenant=tenant, deadline_s=deadline)
        self.running.submit(flight)
        return flight


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))


async def _aside(size: int, make: Callable[[], Made]) -> Made:
    """A long text is worked on in another thread: the tokenizer leaves Python to the event loop."""
    return make() if size <= SHORT else await asyncio.to_thread(make)
