"""A model's tokenizer, templates and grammars for a server: short texts, long texts and grammars have separate
lanes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from penstock.sandbox.jobs import (
    CompileGrammar,
    EncodeChat,
    EncodeInfill,
    EncodeText,
    EncodeWords,
    Ids,
    Job,
    SpellIds,
    Texts,
    Tried,
    Words,
    ids_of,
    pack_ids,
    pack_job,
    unpack_reply,
)
from penstock.sandbox.lanes import Lane, Lanes, Slots
from penstock.sandbox.limits import GRAMMAR_BYTES, TEXT_BYTES
from penstock.sandbox.process import Sandbox
from penstock.sandbox.program import GRAMMAR_S, PATIENCE, TEXT_S, grammar_refusal, text_refusal
from penstock.text.infill import Gap, Room
from penstock.types import GrammarFacts, StructuredOutputsParams

SHORT_BYTES = 1 << 16  # of a job; longer ones queue separately
SHORT_LANES, LONG_LANES = 2, 1
SHORT_S = 15.0
LONG_NICENESS, GRAMMAR_NICENESS, SLOW_NICENESS = 10, 5, 15
MAX_WAITING = 1024
QUICK_S = 0.4  # CPU time before a grammar moves to the slow queue
QUICK_GRAMMARS, SLOW_GRAMMARS = 4, 2
MIN_PATIENCE_S = 20.0
MAX_SLOW = 16  # in the queue
MAX_KEPT = 1024  # grammars with a known trial
MAX_KEPT_CHARS = 1 << 24  # of their sources


class TextService:
    """Used by one event loop. A cancelled caller frees its lane."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._short = Lanes(sandbox, SHORT_LANES, TEXT_BYTES, 0, SHORT_S, MAX_WAITING)
        self._long = Lanes(sandbox, LONG_LANES, TEXT_BYTES, LONG_NICENESS, TEXT_S, MAX_WAITING)
        self._quick = Slots(QUICK_GRAMMARS, MAX_WAITING, "grammars to compile")
        self._slow = Slots(SLOW_GRAMMARS, MAX_SLOW, "slow grammars to compile")
        self._trials: dict[StructuredOutputsParams, _Trial] = {}
        self._facts: OrderedDict[StructuredOutputsParams, GrammarFacts] = OrderedDict()
        self._facts_chars = 0

    async def encode(
        self, text: str, add_special_tokens: bool, max_tokens: int | None, tenant: str = "", parse_special: bool = True
    ) -> list[int]:
        job = EncodeText(text, add_special_tokens, max_tokens, parse_special)
        return ids_of(unpack_reply(await self._run(job, tenant), Ids).ids)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        values: Mapping[str, Any],
        max_tokens: int | None,
        parse_special: bool,
        tenant: str = "",
        template: str | None = None,
    ) -> tuple[list[int], str]:
        job = EncodeChat([dict(one) for one in messages], dict(values), max_tokens, parse_special, template)
        reply = unpack_reply(await self._run(job, tenant), Ids)
        return ids_of(reply.ids), reply.text or ""

    async def encode_infill(
        self, gap: Gap, room: Room | None, add_special_tokens: bool, max_tokens: int | None, tenant: str = ""
    ) -> list[int]:
        job = EncodeInfill(gap, room, add_special_tokens, max_tokens)
        return ids_of(unpack_reply(await self._run(job, tenant), Ids).ids)

    async def encode_words(self, words: Sequence[str], tenant: str = "") -> list[list[int]]:
        return unpack_reply(await self._run(EncodeWords(list(words)), tenant), Words).words

    async def spell(self, ids: Sequence[int], alone: bool, tenant: str = "") -> list[str]:
        """Return the text of each id alone, or of all together."""
        return unpack_reply(await self._run(SpellIds(pack_ids(ids), alone), tenant), Texts).texts

    async def _run(self, job: Job, tenant: str) -> bytes:
        data = pack_job(job)
        lanes, within_s = (self._short, SHORT_S) if len(data) <= SHORT_BYTES else (self._long, TEXT_S)
        try:
            return await lanes.call(data, tenant)
        except OSError as error:
            raise text_refusal(error, within_s) from None

    async def try_grammar(self, params: StructuredOutputsParams, max_tokens: int, tenant: str = "") -> GrammarFacts:
        """Try a grammar. Concurrent equal requests share the trial; it ends when the last caller leaves."""
        known = self._facts.get(params)
        if known is not None and known.decides(max_tokens):
            self._facts.move_to_end(params)
            return known
        trial = self._trials.get(params)
        if trial is None or trial.is_abandoned:
            trial = self._trials[params] = _Trial(asyncio.ensure_future(self._try(params, max_tokens, tenant)))
            trial.task.add_done_callback(partial(self._end_trial, params, trial))
        facts = await trial.join()
        self._keep(params, facts)
        return facts if facts.decides(max_tokens) else await self.try_grammar(params, max_tokens, tenant)

    def _end_trial(self, params: StructuredOutputsParams, trial: _Trial, task: asyncio.Future[GrammarFacts]) -> None:
        if self._trials.get(params) is trial:
            del self._trials[params]

    async def _try(self, params: StructuredOutputsParams, max_tokens: int, tenant: str) -> GrammarFacts:
        data = pack_job(CompileGrammar(params, max_tokens))
        async with self._quick.turn(tenant):
            body = await self._compile(data, GRAMMAR_NICENESS, QUICK_S)
        if body is None:
            async with self._slow.turn(tenant):
                body = await self._compile(data, SLOW_NICENESS, GRAMMAR_S)
        if body is None:
            raise grammar_refusal(OSError())
        return unpack_reply(body, Tried).facts

    async def _compile(self, data: bytearray, niceness: int, cpu_s: float) -> bytes | None:
        """Return the reply; None at a time or memory limit."""
        lane = await Lane.begin(self._sandbox, GRAMMAR_BYTES, niceness, cpu_s, grammars=True)
        try:
            return await lane.call(data, max(MIN_PATIENCE_S, PATIENCE * cpu_s))
        except OSError:
            return None
        finally:
            lane.end()

    def _keep(self, params: StructuredOutputsParams, facts: GrammarFacts) -> None:
        if params not in self._facts:
            self._facts_chars += len(params.source)
        self._facts[params] = facts
        self._facts.move_to_end(params)
        while len(self._facts) > MAX_KEPT or self._facts_chars > MAX_KEPT_CHARS:
            dropped, _ = self._facts.popitem(last=False)
            self._facts_chars -= len(dropped.source)

    def close(self) -> None:
        for trial in list(self._trials.values()):
            trial.task.cancel()
        self._short.close()
        self._long.close()


class _Trial:
    def __init__(self, task: asyncio.Task[GrammarFacts]) -> None:
        self.task = task
        self.is_abandoned = False
        self._num_waiting = 0

    async def join(self) -> GrammarFacts:
        self._num_waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self._num_waiting -= 1
            if not self._num_waiting and not self.task.done():
                self.is_abandoned = True
                self.task.cancel()
