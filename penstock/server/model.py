"""One model as the API process sees it: its engine, tokenizer, texts and defaults."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.api.defaults import Defaults, from_wire
from penstock.engine.messages import Answer, Found, Ready
from penstock.errors import EngineFailed, InvalidRequest
from penstock.host.gguf_parts import model_files
from penstock.host.session_records import SessionRecords
from penstock.host.version import VERSION
from penstock.sandbox.process import Sandbox
from penstock.sandbox.program import SandboxedProgram
from penstock.sandbox.service import TextService
from penstock.server.config import ServerConfig
from penstock.server.engines.admission import AdmissionQueue
from penstock.server.engines.fleet import Fleet
from penstock.server.engines.process import WORKER, Launch
from penstock.server.handover.roles import make_transfer
from penstock.server.http.keys import read_secret
from penstock.server.loras.registry import LoraRegistry
from penstock.text.chat.template import read_template
from penstock.text.intake import Intake, Prepared
from penstock.text.prompt_encoder import Encoded, Messages, Prompt
from penstock.text.tokenizers.decoding import TokenizerInfo
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import BeamSearchParams, Request, SamplingParams

IDS_PER_YIELD = 4096  # decoded before the event loop gets control
MAX_CONCURRENT_PROMPTS = 64  # per request, in the tokenizer's processes


class ModelText:
    """A model's intake, and its tokenizer in sandboxed processes."""

    def __init__(self, name: str, intake: Intake, tokenizer: Tokenizer | None, service: TextService | None) -> None:
        self.name, self.intake, self.tokenizer, self._service = name, intake, tokenizer, service

    @property
    def service(self) -> TextService:
        if self._service is None:
            raise InvalidRequest(f"{self.name} was loaded without a tokenizer: give token ids")
        return self._service

    async def encode(
        self,
        prompt: Prompt,
        *,
        cut: bool = False,
        add_special_tokens: bool = True,
        tenant: str = "",
        may_be_empty: bool = False,
    ) -> Encoded:
        intake = self.intake
        if not isinstance(prompt, str):
            return intake.encode(prompt, cut=cut)
        if prompt or not may_be_empty:
            intake.check_text(prompt, cut)
        with intake.explain_too_long(cut):
            tokens = await self.service.encode(prompt, add_special_tokens, intake.limit(cut), tenant)
        return Encoded(tokens, prompt) if may_be_empty else intake.wrap_tokens(tokens, prompt)

    async def encode_all(
        self, prompts: Sequence[Prompt], *, cut: bool = False, add_special_tokens: bool = True, tenant: str = ""
    ) -> list[Encoded]:
        """Encode many prompts, a few at a time; token ids at once."""
        if not any(isinstance(prompt, str) for prompt in prompts):
            return [self.intake.encode(prompt, cut=cut) for prompt in prompts]
        encoded: list[Encoded] = []
        for at in range(0, len(prompts), MAX_CONCURRENT_PROMPTS):
            some = prompts[at : at + MAX_CONCURRENT_PROMPTS]
            encoded += await asyncio.gather(
                *(self.encode(one, cut=cut, add_special_tokens=add_special_tokens, tenant=tenant) for one in some)
            )
        return encoded

    async def encode_messages(
        self,
        messages: Messages,
        values: Mapping[str, Any],
        *,
        cut: bool = False,
        add_special_tokens: bool = False,
        tenant: str = "",
        template: str | None = None,
    ) -> Encoded:
        """Render and encode `messages`; `template` replaces the model's own."""
        intake = self.intake
        with intake.explain_too_long(cut):
            tokens, text = await self.service.encode_chat(
                messages, values, intake.limit(cut), intake.parse_special, tenant, template
            )
        if add_special_tokens:
            return await self.encode(text, cut=cut, tenant=tenant)
        return intake.wrap_tokens(tokens, text)

    async def keep_beginning(self, encoded: Encoded, length: int, tenant: str = "") -> Encoded:
        """Truncate to `length` tokens, special tokens included, as embeddings are truncated."""
        inner = None
        if encoded.prompt is not None and self._service is not None and len(encoded.tokens) > length:
            inner = await self.service.encode(encoded.prompt, False, None, tenant)
        return self.intake.keep_beginning(encoded, length, inner)

    async def decode_each(self, ids: Sequence[int]) -> list[str]:
        """Decode each id by itself, yielding to the event loop in between."""
        assert self.tokenizer is not None
        if self.tokenizer.spelling.decoder.kind == "pairs":
            return await self.service.spell(ids, alone=True)
        texts: list[str] = []
        for begin in range(0, len(ids), IDS_PER_YIELD):
            texts += [self.tokenizer.token_text(id) for id in ids[begin : begin + IDS_PER_YIELD]]
            await asyncio.sleep(0)
        return texts

    async def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, special tokens included, yielding to the event loop in between."""
        assert self.tokenizer is not None
        if self.tokenizer.spelling.decoder.kind == "pairs":
            return (await self.service.spell(ids, alone=False))[0]
        stream, parts = self.tokenizer.spelling.stream(), []
        for begin in range(0, len(ids), IDS_PER_YIELD):
            parts.append(stream.push(ids[begin : begin + IDS_PER_YIELD]))
            await asyncio.sleep(0)
        return "".join([*parts, stream.finish()])

    def has_to_prepare(self, params: SamplingParams | BeamSearchParams) -> bool:
        """True if `prepare` waits for other processes or threads."""
        if isinstance(params, BeamSearchParams):
            return False
        return bool(params.bad_words) or params.structured_outputs is not None or params.has_dry

    async def prepare(self, encoded: Encoded, params: SamplingParams | BeamSearchParams, tenant: str = "") -> Prepared:
        """Run what a request needs before it is queued: encode bad words, try the grammar."""
        if isinstance(params, BeamSearchParams):
            return Prepared()
        words = await self.service.encode_words(params.bad_words, tenant) if params.bad_words else ()
        asked, facts = params.structured_outputs, None
        if asked is not None:
            num_prompt = min(len(encoded.tokens), params.truncate_prompt_tokens or len(encoded.tokens))
            max_tokens = self.intake.max_tokens(num_prompt, params)
            max_tokens -= encoded.reasoning is not None and encoded.reasoning.is_open  # for the end marker
            facts = await self.service.try_grammar(asked, max_tokens, tenant)
            facts.require_fit(max_tokens)
        breakers = await asyncio.to_thread(self.intake.dry_breakers, params) if params.has_dry else b""
        return Prepared(tuple(tuple(word) for word in words), facts, breakers)


class ServedModel:
    """A model that is loaded on first use; `open` may be called any number of times."""

    def __init__(
        self,
        name: str,
        model: str,
        options: Mapping[str, Any],
        folder: Path,
        admission: AdmissionQueue,
        *,
        config: ServerConfig,
        command: Sequence[str] = WORKER,
        public: Sequence[str] = (),
    ) -> None:
        self.name, self.model = name, model
        self.tool_call_parser, self.reasoning_parser = config.tool_call_parser, config.reasoning_parser
        self.created = int(time.time())
        self._num_bytes = 0
        self._public_texts = tuple(public)
        self._public: list[list[int]] = []  # prefixes that all tenants share
        self._used_s = time.monotonic()
        self.keep_alive_s = math.inf  # idle time until it is unloaded
        self.is_unloaded = False  # loaded again on demand
        transfer = make_transfer(config, read_secret(config.router_key_file, "router_key_file"))
        launch = Launch(model, dict(options), folder, config.num_engines, command, config.role, transfer)
        self._make_engine = partial(
            Fleet, name, launch, admission, hang_s=config.hang_timeout, on_found=self._start_text
        )
        self.admission = admission
        self.loras = LoraRegistry(self._ask, is_enabled=bool(options.get("enable_lora")))
        self.sessions = SessionRecords(options.get("kv_offloading_path"))
        self.engine: Fleet | None = None
        self.path: Path | None = None
        self._fingerprint: tuple[Ready, str] | None = None  # and what it was made of
        self._seed = options.get("seed")
        self._task: asyncio.Task[None] | None = None
        self._sandbox: Sandbox | None = None
        self._facts: asyncio.Future[TokenizerInfo] | None = None
        self._service: TextService | None = None
        self._text: ModelText | None = None
        self._parse_special = bool(options.get("parse_special_tokens"))
        template: str | None = options.get("chat_template")
        self._template = None if template is None else read_template(template)
        self._ready: asyncio.Task[None] | None = None
        self.tokenizer: Tokenizer | None = None
        self.defaults = SamplingParams()
        self.found_defaults = Defaults(())  # with their reasons

    @property
    def is_loaded(self) -> bool:
        return self._text is not None and self.engine is not None and self.engine.failure is None

    @property
    def is_busy(self) -> bool:
        return self.engine is not None and self.engine.is_busy

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._used_s

    def touch(self) -> None:
        self._used_s = time.monotonic()

    async def open(self) -> None:
        """Load the model if needed, and wait for it."""
        self.is_unloaded = False
        if self._ready is None or self._ready.done() and (self._ready.cancelled() or self._ready.exception()):
            self._close_text()  # of a failed attempt
            self.engine = self._make_engine()
            self.engine.list_first(self.loras.list_messages)
            self._task = asyncio.ensure_future(self.engine.run())
            self._ready = asyncio.ensure_future(self._prepare(self.engine))
        await asyncio.shield(self._ready)
        self.touch()
        if self.engine is not None and self.engine.failure:
            raise EngineFailed(self.engine.failure)

    async def _prepare(self, engine: Fleet) -> None:
        facts = await engine.wait_ready()
        self.tokenizer = None
        if self._facts is not None:
            try:
                found = await self._facts
            except BaseException:
                await engine.close()  # useless without its tokenizer
                raise
            if self._sandbox is None:
                raise EngineFailed(f"{self.name} was unloaded before it was ready")
            self.tokenizer = Tokenizer.from_info(found, SandboxedProgram(self._sandbox), str(self.path))
            self._service = TextService(self._sandbox)
        found_defaults = self.found_defaults = from_wire(facts.defaults, facts.defaults_recommended)
        self.defaults = found_defaults.params.clone(max_tokens=None)
        seed = self._seed if self._seed is not None else int.from_bytes(os.urandom(8), "little")
        intake = Intake(
            tokenizer=self.tokenizer,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            cache_tokens=facts.kv_cache_tokens,
            generation_config=facts.generation_config,
            seed=seed,
            parse_special=self._parse_special,
            max_output_tokens=found_defaults.max_tokens,
        )
        try:
            await self.loras.load_modules()
        except BaseException:
            await engine.close()
            raise
        self.touch()  # loaded from here on: it must not count as idle before who waits for it has used it
        self._text = ModelText(self.name, intake, self.tokenizer, self._service)
        self._public = [tokens for text in self._public_texts for tokens in await self._encode_public(text)]

    async def _encode_public(self, text: str) -> list[list[int]]:
        """Encode a public prefix, as plain text and as the chat template's system message."""
        found = []
        if self.tokenizer is not None:
            found.append((await self.text.encode(text)).tokens)
        if self.tokenizer is not None and self.tokenizer.chat_template is not None:
            with contextlib.suppress(InvalidRequest):  # the template may require a user message
                system = [{"role": "system", "content": text}]
                found.append((await self.text.encode_messages(system, {"add_generation_prompt": False})).tokens)
        return found

    def _start_text(self, facts: Found) -> None:
        self.path = Path(facts.path)
        if self._facts is None:
            source = facts.metadata if facts.metadata is not None else facts.folder or ""
            self._facts = asyncio.ensure_future(self._load_tokenizer(source, facts.path))

    async def _load_tokenizer(self, source: str | Mapping[str, Any], origin: str) -> TokenizerInfo:
        self._sandbox = sandbox = Sandbox()  # on the main thread: it dies with its parent thread
        return await asyncio.to_thread(sandbox.load, source, origin, self._template)

    def _close_text(self) -> None:
        if self._facts is not None:
            self._facts.add_done_callback(lambda facts: facts.cancelled() or facts.exception())  # else asyncio logs it
        service, self._service, self._text, self._facts = self._service, None, None, None
        sandbox, self._sandbox = self._sandbox, None
        if service is not None:
            service.close()
        if sandbox is not None:
            sandbox.close()

    async def close(self) -> None:
        engine, self.engine = self.engine, None
        tasks = [task for task in (self._task, self._ready) if task is not None]
        self._task = self._ready = None
        self.is_unloaded = True
        self._close_text()
        if engine is not None:
            await engine.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and KV cache, as last loaded; 0 before."""
        if self.is_loaded:
            self._num_bytes = self.facts.num_bytes + self.facts.kv_cache_bytes
        return self._num_bytes

    @property
    def file_bytes(self) -> int:
        path = self.path or Path(self.model)
        return sum(file.stat().st_size for file in model_files(path))

    @property
    def running(self) -> Fleet:
        if self.engine is None:
            raise EngineFailed(f"{self.name} is not loaded")
        return self.engine

    async def _ask(self, message: object) -> Answer:
        return await self.running.ask(message)

    @property
    def facts(self) -> Ready:
        facts = self.running.facts
        if facts is None:
            raise EngineFailed(f"{self.name} is still being loaded")
        return facts

    @property
    def text(self) -> ModelText:
        if self._text is None:
            raise EngineFailed(f"{self.name} is not loaded")
        return self._text

    @property
    def fingerprint(self) -> str:
        """A hash of weights and settings, as far as the API process knows them."""
        facts = self.facts
        if self._fingerprint is None or self._fingerprint[0] is not facts:
            identity = f"{VERSION}:{self.path}:{facts.num_bytes}:{facts.settings}"
            self._fingerprint = facts, "fp_" + hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()
        return self._fingerprint[1]

    def make_request(
        self,
        encoded: Encoded,
        params: SamplingParams | BeamSearchParams,
        prepared: Prepared,
        *,
        priority: int = 0,
        salt: str = "",
        pool: bool = False,
        tenant: str = "",
    ) -> Request:
        if pool != self.facts.is_encoder:
            raise InvalidRequest(
                f"{self.name} "
                + (
                    "is not an embedding model: use one for embeddings"
                    if pool
                    else "is an embedding model and cannot generate text: use /v1/embeddings"
                )
            )
        num_public = (
            max((_count_common(public, encoded.tokens) for public in self._public), default=0)
            if salt and not pool
            else 0
        )
        return self.text.intake.request(
            replace(encoded, salt=salt),
            params,
            priority=priority,
            num_public=num_public,
            pool=pool,
            prepared=prepared,
            tenant=tenant,
        )


def _count_common(first: Sequence[int], two: Sequence[int]) -> int:
    """Count the tokens of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(first, two)) if a != b), min(len(first), len(two)))
