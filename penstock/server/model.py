"""One model as the API process knows it: its names, its engine, its tokenizer, and what it takes in."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.defaults import Defaults, from_wire
from penstock.engine.messages import Found, Ready
from penstock.errors import EngineFailed, InvalidRequest
from penstock.intake import Encoded, Intake, Messages, Prepared, Prompt
from penstock.sandbox.process import Sandbox
from penstock.sandbox.program import SandboxedProgram
from penstock.sandbox.service import TextService
from penstock.server.admission import Admission
from penstock.server.engine import RemoteEngine
from penstock.server.process import WORKER
from penstock.text.facts import TokenizerFacts
from penstock.text.template_file import read_template
from penstock.text.tokenizer import Tokenizer
from penstock.types import Request, SamplingParams
from penstock.version import VERSION

PART_IDS = 4096  # spelled before others have their turn at the event loop
PROMPTS_AT_ONCE = 64  # of one request, in line for the tokenizer


class ServedModel:
    """Opened on first use; `open` may be called any number of times."""

    def __init__(
        self,
        name: str,
        model: str,
        options: Mapping[str, Any],
        folder: Path,
        admission: Admission,
        *,
        hang_s: float,
        command: Sequence[str] = WORKER,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        public: Sequence[str] = (),
    ) -> None:
        self.name, self.model = name, model
        self.tool_call_parser, self.reasoning_parser = tool_call_parser, reasoning_parser
        self.created = int(time.time())
        self._num_bytes = 0
        self._public_texts = tuple(public)
        self._public: list[list[int]] = []  # token ids that all tenants share as prefixes
        self._used_s = time.monotonic()
        self.keep_alive_s = math.inf  # idle time after which it is unloaded
        self.resting = False  # unloaded, to be loaded again when it is asked for
        self._make_engine = partial(
            RemoteEngine, name, model, options, folder, admission, hang_s=hang_s, command=command, on_found=self._found
        )
        self.admission = admission
        self.engine: RemoteEngine | None = None
        self.path: Path | None = None
        self._seed = options.get("seed")
        self._task: asyncio.Task[None] | None = None
        self._sandbox: Sandbox | None = None
        self._facts: asyncio.Future[TokenizerFacts] | None = None
        self._text: TextService | None = None
        self._parse_special = bool(options.get("parse_special_tokens"))
        template: str | None = options.get("chat_template")
        self._template = None if template is None else read_template(template)
        self._ready: asyncio.Task[None] | None = None
        self.tokenizer: Tokenizer | None = None
        self.intake: Intake | None = None
        self.defaults = SamplingParams()
        self.found_defaults = Defaults(())  # the same with their reasons

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
            self._close_text()  # of a try that failed
            self.engine = self._make_engine()
            self._task = asyncio.ensure_future(self.engine.run())
            self._ready = asyncio.ensure_future(self._prepare(self.engine))
        await asyncio.shield(self._ready)
        self.touch()
        if self.engine is not None and self.engine.failure:
            raise EngineFailed(self.engine.failure)

    async def _prepare(self, engine: RemoteEngine) -> None:
        facts = await engine.loaded()
        self.tokenizer = None
        if self._facts is not None:
            try:
                found = await self._facts
            except BaseException:
                await engine.close()  # without its tokenizer it is of no use
                raise
            assert self._sandbox is not None
            self.tokenizer = Tokenizer.from_facts(found, SandboxedProgram(self._sandbox), str(self.path))
            self._text = TextService(self._sandbox)
        found_defaults = self.found_defaults = from_wire(facts.defaults, facts.defaults_recommended)
        self.defaults = found_defaults.params.clone(max_tokens=None)
        seed = self._seed if self._seed is not None else int.from_bytes(os.urandom(8), "little")
        self.intake = Intake(
            self.tokenizer,
            facts.vocab_size,
            facts.max_model_len,
            facts.kv_cache_tokens,
            facts.generation_config,
            seed,
            parse_special=self._parse_special,
            max_output_tokens=found_defaults.max_tokens,
        )
        self._public = [tokens for text in self._public_texts for tokens in await self._public_tokens(text)]

    async def _public_tokens(self, text: str) -> list[list[int]]:
        """A declared text as a prompt begins with it: as it stands, and as the chat template's system message."""
        found = []
        if self.tokenizer is not None:
            found.append((await self.encode(text)).tokens)
        if self.tokenizer is not None and self.tokenizer.chat_template is not None:
            with contextlib.suppress(InvalidRequest):  # a template may want a user too
                system = [{"role": "system", "content": text}]
                found.append((await self.encode_messages(system, {"add_generation_prompt": False})).tokens)
        return found

    def _num_public(self, tokens: Sequence[int]) -> int:
        return max((_common(public, tokens) for public in self._public), default=0)

    def _found(self, found: Found) -> None:
        self.path = Path(found.path)
        if self._facts is None:
            source = found.metadata if found.metadata is not None else found.folder or ""
            self._facts = asyncio.ensure_future(self._load_text(source, found.path))

    async def _load_text(self, source: str | Mapping[str, Any], origin: str) -> TokenizerFacts:
        self._sandbox = sandbox = Sandbox()  # on the main thread, with which it dies
        return await asyncio.to_thread(sandbox.load, source, origin, self._template)

    def _close_text(self) -> None:
        text, self._text, self._facts = self._text, None, None
        sandbox, self._sandbox = self._sandbox, None
        if text is not None:
            text.close()
        if sandbox is not None:
            sandbox.close()

    async def close(self) -> None:
        engine, self.engine, self.intake, self._ready = self.engine, None, None, None
        task, self._task = self._task, None
        self.resting = True
        self._close_text()
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

    @property
    def text(self) -> TextService:
        if self._text is None:
            raise InvalidRequest(f"{self.name} was loaded without a tokenizer: give token ids")
        return self._text

    async def encode(
        self,
        prompt: Prompt,
        *,
        cut: bool = False,
        add_special_tokens: bool = True,
        tenant: str = "",
        may_be_empty: bool = False,
    ) -> Encoded:
        intake = self.taking
        if not isinstance(prompt, str):
            return intake.encode(prompt, cut=cut)
        if prompt or not may_be_empty:
            intake.check_text(prompt, cut)
        with intake.explain_too_long(cut):
            tokens = await self.text.encode(prompt, add_special_tokens, intake.limit(cut), tenant)
        return Encoded(tokens, prompt) if may_be_empty else intake.encoded(tokens, prompt)

    async def encode_all(
        self, prompts: Sequence[Prompt], *, cut: bool = False, add_special_tokens: bool = True, tenant: str = ""
    ) -> list[Encoded]:
        """Many prompts, few at a time in each of the tokenizer's processes."""
        encoded: list[Encoded] = []
        for at in range(0, len(prompts), PROMPTS_AT_ONCE):
            some = prompts[at : at + PROMPTS_AT_ONCE]
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
        """`template` takes the place of the model's own."""
        intake = self.taking
        with intake.explain_too_long(cut):
            tokens, text = await self.text.encode_chat(
                messages, values, intake.limit(cut), intake.parse_special, tenant, template
            )
        if add_special_tokens:
            return await self.encode(text, cut=cut, tenant=tenant)
        return intake.encoded(tokens, text)

    async def beginning(self, encoded: Encoded, length: int, tenant: str = "") -> Encoded:
        """The first `length` tokens, among them what the tokenizer puts around a text: how embeddings are cut."""
        inner = None
        if encoded.prompt is not None and self._text is not None and len(encoded.tokens) > length:
            inner = await self.text.encode(encoded.prompt, False, None, tenant)
        return self.taking.beginning(encoded, length, inner)

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Each id's text by itself. Others have their turn in between."""
        assert self.tokenizer is not None
        if self.tokenizer.spelling.decoder.kind == "pairs":
            return await self.text.spell(ids, alone=True)
        texts: list[str] = []
        for begin in range(0, len(ids), PART_IDS):
            texts += [self.tokenizer.token_text(id) for id in ids[begin : begin + PART_IDS]]
            await asyncio.sleep(0)
        return texts

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens too. Others have their turn in between."""
        assert self.tokenizer is not None
        if self.tokenizer.spelling.decoder.kind == "pairs":
            return (await self.text.spell(ids, alone=False))[0]
        stream, parts = self.tokenizer.spelling.stream(), []
        for begin in range(0, len(ids), PART_IDS):
            parts.append(stream.push(ids[begin : begin + PART_IDS]))
            await asyncio.sleep(0)
        return "".join([*parts, stream.finish()])

    async def prepare(self, encoded: Encoded, params: SamplingParams, tenant: str = "") -> Prepared:
        """Run the text programs that a request needs before it is queued: encode its bad words, try its grammar."""
        words = await self.text.encode_words(params.bad_words, tenant) if params.bad_words else ()
        asked, facts = params.structured_outputs, None
        if asked is not None:
            num_prompt = min(len(encoded.tokens), params.truncate_prompt_tokens or len(encoded.tokens))
            max_tokens = self.taking.max_tokens(num_prompt, params)
            max_tokens -= encoded.reasoning is not None and encoded.reasoning.is_open  # its end marker
            facts = await self.text.try_grammar(asked, max_tokens, tenant)
            facts.require_fit(max_tokens)
        breakers = await asyncio.to_thread(self.taking.dry_breakers, params) if params.has_dry else b""
        return Prepared(tuple(tuple(word) for word in words), facts, breakers)

    # requests

    def request(
        self,
        encoded: Encoded,
        params: SamplingParams,
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
                    "generates text and makes no embeddings: use an embedding model"
                    if pool
                    else "is an embedding model and generates no text: use /v1/embeddings"
                )
            )
        num_public = self._num_public(encoded.tokens) if salt and not pool else 0
        return self.taking.request(
            encoded.tokens,
            params,
            priority=priority,
            salt=salt,
            num_public=num_public,
            pool=pool,
            prepared=prepared,
            tenant=tenant,
            reasoning=encoded.reasoning,
        )


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))
