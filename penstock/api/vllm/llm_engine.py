"""vLLM's LLMEngine: requests are added one by one, and each step returns what is new."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.api.prompts import AnyLora, cuts
from penstock.errors import InvalidRequest, quote
from penstock.outputs import OutputStream
from penstock.text.answers import Collector
from penstock.text.prompt_encoder import Prompt
from penstock.types import LoRARequest, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from penstock.api.llm import LLM
    from penstock.api.vllm.porting import EngineArgs
    from penstock.text.pretrained import PretrainedTokenizer


@dataclass(frozen=True)
class ModelConfig:
    """The facts about a model that vLLM scripts read."""

    model: str
    max_model_len: int
    dtype: str
    seed: int
    vocab_size: int
    architecture: str

    def get_vocab_size(self) -> int:
        return self.vocab_size


class LLMEngine:
    """Steps run only when `step` is called. Use it from one thread, without an LLM beside it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._collectors: dict[str, Collector] = {}
        self._streams: dict[str, OutputStream] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        from penstock.api.llm import LLM

        return cls(LLM(**vars(engine_args)))

    @property
    def model_config(self) -> ModelConfig:
        assembly = self._llm.service.assembly
        settings, spec = assembly.settings, assembly.spec
        return ModelConfig(
            self._llm.model, settings.max_model_len, settings.dtype, settings.seed, spec.vocab_size, spec.architecture
        )

    def get_model_config(self) -> ModelConfig:
        return self.model_config

    def get_tokenizer(self) -> PretrainedTokenizer | None:
        return self._llm.get_tokenizer()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        lora_request: AnyLora = None,
        priority: int = 0,
    ) -> None:
        """Queue a prompt under the caller's own id."""
        if request_id in self._collectors:
            raise InvalidRequest(f"request_id={quote(request_id)} is in use: give each request an id of its own")
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params of type {type(params).__name__} are not supported: give SamplingParams")
        service = self._llm.service
        encoded = service.intake.encode(prompt, cut=cuts(params))
        collector = self._collectors[request_id] = service.submit(encoded, params, priority=priority, lora=lora_request)
        sampling = collector.request.sampling
        if sampling.num_siblings == sampling.n:
            stream = self._streams[request_id] = OutputStream(request_id, collector)
            collector.listener = stream.push

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        for id in [request_id] if isinstance(request_id, str) else list(request_id):
            collector = self._collectors.pop(id, None)
            self._streams.pop(id, None)
            if collector is not None:
                self._llm.service.abort(collector)

    def has_unfinished_requests(self) -> bool:
        return bool(self._collectors)

    def get_num_unfinished_requests(self) -> int:
        return len(self._collectors)

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs of requests that it extended. With best_of > n, answers are only known at
        the end."""
        if not self._collectors:
            return []
        self._llm.service.step()
        found: list[RequestOutput] = []
        for id, collector in list(self._collectors.items()):
            stream = self._streams.get(id)
            output = stream.take() if stream is not None else None
            if stream is None and collector.finished:
                output = replace(collector.output(), request_id=id)
            if output is not None:
                found.append(output)
            if collector.finished:
                del self._collectors[id]
                self._streams.pop(id, None)
        return found

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter before its first request."""
        return self._llm.service.loras.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Free an adapter that no request uses; False if there is none of that id."""
        return self._llm.service.loras.remove(lora_id)

    def list_loras(self) -> set[int]:
        return self._llm.service.loras.list_ids()

    def reset_prefix_cache(self) -> bool:
        return self._llm.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        return self._llm.stats()

    def close(self) -> None:
        self._llm.close()

    shutdown = close
