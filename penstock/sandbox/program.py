"""A model's tokenizer and chat templates run in a sandboxed process, for callers that wait."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypeVar

from penstock.errors import InvalidRequest
from penstock.sandbox import frames
from penstock.sandbox.jobs import (
    CompileGrammar,
    DecodeIds,
    Described,
    DescribeTokens,
    EncodeChat,
    EncodeInfill,
    EncodeText,
    EncodeWords,
    Ids,
    Job,
    RenderChat,
    Text,
    Tried,
    Words,
)
from penstock.sandbox.limits import GRAMMAR_BYTES, TEXT_BYTES
from penstock.sandbox.process import Sandbox
from penstock.sandbox.replies import ids_of, packed, unpacked
from penstock.text.facts import TokenNames
from penstock.text.infill import Gap, Room
from penstock.text.template import Message, plain
from penstock.text.tokenizer import Tokenizer
from penstock.types import GrammarFacts, StructuredOutputsParams

TEXT_S = 60.0
MANY_BYTES = 1 << 22
BYTES_PER_BYTE, S_PER_BYTE = 256, 1e-5  # that a tokenizer without words takes for a long text
GRAMMAR_S = 10  # of computing
PATIENCE = 6  # times that much, for a machine that is busy with other things
Kind = TypeVar("Kind")


class SandboxedProgram:
    """One lane, used by one caller at a time. Whatever disturbs a call, Ctrl-C too, costs that lane and no more."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._lock = threading.Lock()
        self._lane: tuple[int, socket.socket] | None = None
        weakref.finalize(self, sandbox.close)

    def encode_upto(self, text: str, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequest(f"a prompt must be a string, not {type(text).__name__}")
        return ids_of(self._text(EncodeText(text, add_special_tokens, max_tokens), Ids).ids)

    def encode_chat(
        self,
        messages: Sequence[Message],
        values: Mapping[str, Any],
        max_tokens: int | None = None,
        parse_special: bool = False,
        template: str | None = None,
    ) -> tuple[list[int], str]:
        reply = self._text(EncodeChat(plain(messages), plain(values), max_tokens, parse_special, template), Ids)
        return ids_of(reply.ids), reply.text or ""

    def encode_infill(self, gap: Gap, room: Room | None, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        return ids_of(self._text(EncodeInfill(gap, room, add_special_tokens, max_tokens), Ids).ids)

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        return self._text(EncodeWords(list(words)), Words).words

    def render(self, messages: Sequence[Message], values: Mapping[str, Any]) -> str:
        return self._text(RenderChat(plain(messages), plain(values)), Text).text

    def decode(self, ids: Sequence[int]) -> str:
        return self._text(DecodeIds(list(ids)), Text).text

    def describe(self) -> TokenNames:
        return self._text(DescribeTokens(), Described).tokens

    def try_grammar(self, asked: StructuredOutputsParams, max_tokens: int) -> GrammarFacts:
        """In a lane of its own, which ends with it."""
        data = packed(CompileGrammar(asked, max_tokens))
        self._stay_at_home()
        number, sock = self.sandbox.fork(GRAMMAR_BYTES, cpu_s=GRAMMAR_S, grammars=True)
        try:
            body, _ = _ask(sock, data, PATIENCE * GRAMMAR_S)
        except OSError as error:
            raise grammar_refusal(error) from None
        finally:
            sock.close()
            self.sandbox.kill(number)
        return unpacked(body, Tried).facts

    def _stay_at_home(self) -> None:
        """A forked process has lanes of its own: two cannot speak on one socket."""
        if self.sandbox.is_foreign:
            self._lock, self._lane = threading.Lock(), None
            self.sandbox.adopt()

    def rest(self) -> None:
        """End the processes; the next call starts them again."""
        self._stay_at_home()
        with self._lock:
            lane, self._lane = self._lane, None
        if lane is not None:
            lane[1].close()
        self.sandbox.rest()

    def _text(self, job: Job, kind: type[Kind]) -> Kind:
        data = packed(job)
        self._stay_at_home()
        with self._lock:
            lane, self._lane = self._lane, None
            try:
                body = None
                if lane is not None and len(data) <= MANY_BYTES:
                    with contextlib.suppress(ConnectionError):  # it may have died while it was idle
                        body = self._exchange(lane, data, TEXT_S)
                if body is None:
                    # the text is the caller's own: a long one gets as much as it needs
                    more = max(0, len(data) - MANY_BYTES)
                    lane = self.sandbox.fork(TEXT_BYTES + more * BYTES_PER_BYTE)
                    body = self._exchange(lane, data, TEXT_S + more * S_PER_BYTE)
            except OSError as error:
                raise text_refusal(error) from None
        return unpacked(body, kind)

    def _exchange(self, lane: tuple[int, socket.socket], data: bytearray, within_s: float) -> bytes:
        """The lane is kept for the next job, unless it ends or anything disturbs this one."""
        ends = True
        try:
            body, ends = _ask(lane[1], data, within_s)
            return body
        finally:
            if ends:
                self._drop(lane)
            else:
                self._lane = lane

    def _drop(self, lane: tuple[int, socket.socket]) -> None:
        lane[1].close()
        with contextlib.suppress(OSError):
            self.sandbox.kill(lane[0])


def _ask(sock: socket.socket, data: bytearray, within_s: float) -> tuple[bytes, bool]:
    sock.settimeout(within_s)
    sock.sendall(data)
    return frames.receive(sock)


def text_refusal(error: BaseException, within_s: float = TEXT_S) -> InvalidRequest:
    if isinstance(error, TimeoutError):
        return InvalidRequest(
            f"the model's tokenizer or chat template did not end within {within_s:g} s on this text: shorten it"
        )
    return InvalidRequest(
        f"the model's tokenizer or chat template takes more than {TEXT_BYTES >> 20} MiB on this text: shorten it"
    )


def grammar_refusal(error: BaseException) -> InvalidRequest:
    limit = f"{GRAMMAR_S} s" if isinstance(error, TimeoutError) else f"{GRAMMAR_S} s or {GRAMMAR_BYTES >> 20} MiB"
    return InvalidRequest(f"structured_outputs: the grammar was not compiled within {limit}: give a simpler one")


def load_sandboxed(
    source: str | PathLike[str] | Mapping[str, Any],
    origin: str = "GGUF file",
    sandbox: Sandbox | None = None,
    template: str | None = None,
) -> Tokenizer:
    """A tokenizer whose programs run in a process of their own; `template` takes the place of its chat templates."""
    sandbox = sandbox or Sandbox()
    try:
        facts = sandbox.load(source, origin, template)
    except BaseException:
        sandbox.close()
        raise
    return Tokenizer.from_facts(facts, SandboxedProgram(sandbox), origin)
