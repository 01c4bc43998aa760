"""vLLM's AsyncLLMEngine: a request's outputs come under the caller's own id, whole or as deltas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING

from penstock.async_llm import AsyncLLM, Stream
from penstock.errors import InvalidRequest, shown
from penstock.intake import Prompt
from penstock.outputs import OutputStream
from penstock.prompts import refuse_lora
from penstock.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from penstock.engine_args import EngineArgs
    from penstock.text.pretrained import PretrainedTokenizer


class AsyncLLMEngine:
    """Requests from any task of one event loop; `AsyncLLM`, which it uses, has the plainer interface."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._streams: dict[str, Stream] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLMEngine:
        return cls(AsyncLLM(**vars(engine_args)))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what `sampling_params.output_kind` asks for. Leaving early, or being cancelled, aborts the request."""
        refuse_lora(lora_request)
        if request_id in self._streams:
            raise InvalidRequest(f"request_id={shown(request_id)} is in use: give each request an id of its own")
        stream = self._streams[request_id] = Stream()
        outputs = None
        try:
            async with aclosing(self._llm.follow(stream, prompt, sampling_params, priority)) as deltas:
                async for delta in deltas:
                    if outputs is None and stream.collector is not None:
                        outputs = OutputStream(request_id, stream.collector)
                    if outputs is not None:
                        outputs.push(delta)
                        if (output := outputs.take()) is not None:
                            yield output
        finally:
            del self._streams[request_id]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their last outputs have finish_reason="abort"."""
        for id in [request_id] if isinstance(request_id, str) else list(request_id):
            if id in self._streams:
                self._llm.abort(self._streams[id])

    async def get_tokenizer(self) -> PretrainedTokenizer | None:
        from penstock.text.pretrained import PretrainedTokenizer

        tokenizer = self._llm.tokenizer
        return None if tokenizer is None else PretrainedTokenizer(tokenizer)

    def shutdown(self) -> None:
        """End the engine; open requests get an error."""
        self._llm.close()
