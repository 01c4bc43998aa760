"""A server with OpenAI's chats and completions that says what a script tells it to: no model behind it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass
class Answer:
    """`num_tokens` chunks of text, `delay_s` before each, and a usage that may say something else."""

    num_tokens: int
    first_s: float = 0.0
    delay_s: float = 0.0
    usage: int | None = -1  # -1: the truth; None: no usage
    num_cached: int | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None  # break the connection off after so many chunks
    error_after: int | None = None  # an error event instead of further chunks
    chunked: bool = True
    open_s: float = 0.0  # keep the connection so long after the answer

    def events(self, body: Body) -> list[Body]:
        texts = self._chat_texts() if "messages" in body else self._completion_texts()
        if self.usage is not None and body["stream_options"]["include_usage"]:
            usage: Body = {"prompt_tokens": 7, "completion_tokens": self.num_tokens if self.usage < 0 else self.usage}
            if self.num_cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": self.num_cached}
            texts.append({"choices": [], "usage": usage})
        return texts

    def _chat_texts(self) -> list[Body]:
        texts: list[Body] = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
        texts += [
            {"choices": [{"index": 0, "delta": {"content": f" t{number}"}, "finish_reason": None}]}
            for number in range(self.num_tokens)
        ]
        return [*texts, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}]

    def _completion_texts(self) -> list[Body]:
        texts = [
            {"choices": [{"index": 0, "text": f" t{number}", "finish_reason": None}]}
            for number in range(self.num_tokens)
        ]
        return [*texts, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}]


Script = Callable[[int, Body], Answer]  # which request it is, and its body


class ChatServer:
    """Runs in a thread of its own, on a port that the system chooses. `bodies` holds what was asked."""

    def __init__(self, script: Script, tokenize: Callable[[str], int] | None = None) -> None:
        self.script, self.tokenize = script, tokenize
        self.bodies: list[Body] = []
        self.heads: list[str] = []
        self.num_now = self.num_most = 0
        self._ready = threading.Event()

    def __enter__(self) -> ChatServer:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split()[0])
        body = json.loads(await reader.readexactly(length) or b"{}")
        try:
            if head.startswith(("POST /v1/chat/completions", "POST /v1/completions")):
                await self._chat(head, body, writer)
            elif head.startswith("POST /tokenize") and self.tokenize:
                _plain(writer, 200, {"tokens": list(range(self.tokenize(body["content"])))})
            else:
                found = head.startswith("GET /health")
                _plain(writer, 200 if found else 404, {"ok": found})
            await writer.drain()
        finally:
            writer.close()

    async def _chat(self, head: str, body: Body, writer: asyncio.StreamWriter) -> None:
        self.heads.append(head)
        self.bodies.append(body)
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        try:
            answer = self.script(len(self.bodies) - 1, body)
            if answer.status != 200:
                await asyncio.sleep(answer.first_s)
                _plain(writer, answer.status, {"error": "refused"}, answer.headers)
            else:
                await _stream(answer, body, writer)
            await asyncio.sleep(answer.open_s)
        finally:
            self.num_now -= 1


def _plain(writer: asyncio.StreamWriter, status: int, value: Body, headers: dict[str, str] | None = None) -> None:
    data = json.dumps(value).encode()
    lines = "".join(f"{name}: {text}\r\n" for name, text in (headers or {}).items())
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n{lines}\r\n".encode() + data)


def _text(choice: Body) -> str | None:
    text: str | None = choice.get("text") or choice.get("delta", {}).get("content")
    return text


async def _stream(answer: Answer, body: Body, writer: asyncio.StreamWriter) -> None:
    framing = "Transfer-Encoding: chunked\r\n" if answer.chunked else ""
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n".encode())

    def write(text: str) -> None:
        data = f"data: {text}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(data), data) if answer.chunked else data)

    number = 0
    for event in answer.events(body):
        if event["choices"] and _text(event["choices"][0]):
            if number == answer.cut_after:
                return
            if number == answer.error_after:
                write(json.dumps({"error": {"message": "out of memory"}}))
                break
            await writer.drain()
            await asyncio.sleep(answer.delay_s if number else answer.first_s)
            number += 1
        write(json.dumps(event))
    write("[DONE]")
    if answer.chunked:
        writer.write(b"0\r\n\r\n")
