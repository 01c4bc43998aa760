"""vLLM's AsyncLLMEngine: outputs come under the caller's own id, cumulative or as deltas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING

from penstock.api.async_llm import AsyncLLM, AsyncStream
from penstock.api.prompts import AnyLora
from penstock.errors import InvalidRequest, quote
from penstock.outputs import OutputStream
from penstock.text.prompt_encoder import Prompt
from penstock.types import LoRARequest, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from penstock.api.vllm.porting import EngineArgs
    from penstock.text.pretrained import PretrainedTokenizer


class AsyncLLMEngine:
    """Takes requests from any task of one event loop; `AsyncLLM` has the plainer interface."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._streams: dict[str, AsyncStream] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLMEngine:
        return cls(AsyncLLM(**vars(engine_args)))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: AnyLora = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs of `sampling_params.output_kind`. Leaving early, or cancellation, aborts the request."""
        if request_id in self._streams:
            raise InvalidRequest(f"request_id={quote(request_id)} is in use: give each request an id of its own")
        stream = self._streams[request_id] = AsyncStream()
        outputs = None
        try:
            async with aclosing(self._llm.follow(stream, prompt, sampling_params, priority, lora_request)) as deltas:
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

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return await self._llm.add_lora(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        return await self._llm.remove_lora(lora_id)

    async def list_loras(self) -> set[int]:
        return await self._llm.list_loras()

    async def get_tokenizer(self) -> PretrainedTokenizer | None:
        from penstock.text.pretrained import PretrainedTokenizer

        tokenizer = self._llm.tokenizer
        return None if tokenizer is None else PretrainedTokenizer(tokenizer)

    def shutdown(self) -> None:
        """End the engine; open requests get an error."""
        self._llm.close()
