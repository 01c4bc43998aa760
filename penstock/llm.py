"""The offline interface, shaped like vLLM's: scripts port by changing the import."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.answers import Collector
from penstock.assemble import assemble
from penstock.batch import Batch, UseTqdm
from penstock.config import EngineConfig, Setting
from penstock.errors import InvalidRequest, PenstockError, shown
from penstock.intake import Encoded, Messages, Prompt
from penstock.interrupts import held_interrupts
from penstock.progress import loading_bar
from penstock.service import Service
from penstock.text.tokenizer import Tokenizer
from penstock.types import (
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    SamplingParams,
    StreamDelta,
)

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model in this process. `options` are the fields of EngineConfig. Use it from one thread at a time."""

    def __init__(self, model: str, *, progress: bool = True, **options: Any) -> None:
        self.model = str(model)
        config = EngineConfig.from_options(**options)
        with loading_bar(progress) as report:
            self._service: Service | None = Service(assemble(self.model, config, show_progress=progress,
                                                             progress=report, offline=True))

    @property
    def service(self) -> Service:
        if self._service is None:
            raise PenstockError("this LLM is closed: make a new one")
        return self._service

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.service.tokenizer

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Every option with its value and why it has it."""
        return self.service.assembly.settings.settings

    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends."""
        return self.service.default_params

    get_default_sampling_params = default_sampling_params

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, use_tqdm: UseTqdm = True,
                 priority: Sequence[int] | None = None) -> list[RequestOutput]:
        """Complete each prompt: a string, a list of token ids, or {"prompt_token_ids": …}.

        A request that the model fails on has finish_reason="error" and leaves the others as they are; if all of them
        fail, the reason is raised.
        """
        items = _as_list(prompts)
        params = self._params_for(sampling_params, len(items))
        encoded = (self.service.intake.encode(item, cut=_cuts(one)) for item, one in zip(items, params))
        return self._run(encoded, params, use_tqdm, priority)

    def chat(self, messages: Messages | Sequence[Messages], sampling_params: Params = None, *, use_tqdm: UseTqdm = True,
             add_generation_prompt: bool = True, continue_final_message: bool = False,
             tools: Sequence[Mapping[str, Any]] | None = None,
             chat_template_kwargs: Mapping[str, Any] | None = None) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template."""
        conversations = _conversations(messages)
        params = self._params_for(sampling_params, len(conversations))
        values = {"add_generation_prompt": add_generation_prompt, "tools": tools,
                  "continue_final_message": continue_final_message, **_template_values(chat_template_kwargs)}
        encoded = (self.service.intake.encode_messages(conversation, values, cut=_cuts(one))
                   for conversation, one in zip(conversations, params))
        return self._run(encoded, params, use_tqdm, None)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: UseTqdm = False,
                    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt, best first."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"params of type {type(params).__name__} are not understood: give BeamSearchParams")
        encoded = [self.service.intake.encode(prompt) for prompt in _as_list(prompts)]
        batch = Batch(self.service, encoded, [params] * len(encoded))
        batch.finish(use_tqdm)
        batch.raise_failure()
        return [BeamSearchOutput([self._beam(collector, output.token_ids, output.cumulative_logprob or 0.0,
                                             output.finish_reason)
                                  for output in collector.output().outputs]) for collector in batch.collectors]

    def _beam(self, collector: Collector, output: list[int], score: float, reason: str | None) -> BeamSearchSequence:
        tokens = [*collector.request.tokens, *output]
        return BeamSearchSequence(tokens, score, self.tokenizer.decode(tokens) if self.tokenizer else None, reason)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: UseTqdm = True,
              truncate_prompt_tokens: int | None = None) -> list[EmbeddingRequestOutput]:
        """One vector per prompt, from an embedding model. `truncate_prompt_tokens` keeps a prompt's beginning."""
        params = SamplingParams(truncate_prompt_tokens=truncate_prompt_tokens)
        intake = self.service.intake
        encoded = [intake.encode(prompt, cut=_cuts(params)) for prompt in _as_list(prompts)]
        if truncate_prompt_tokens is not None:
            encoded = [intake.beginning(one, truncate_prompt_tokens) for one in encoded]
        batch = Batch(self.service, encoded, [params] * len(encoded), pool=True)
        batch.finish(use_tqdm)
        batch.raise_failure()
        return [EmbeddingRequestOutput(c.request.id, list(c.request.tokens), EmbeddingOutput(list(c.embedding or ())))
                for c in batch.collectors]

    def stream(self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None,
               ) -> Iterator[StreamDelta]:
        """Yield each answer's new text as it is made. Closing the iterator aborts the request."""
        params = self.service.streamable(sampling_params)
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            encoded = self.service.intake.encode_messages(prompt, cut=_cuts(params))    # type: ignore[arg-type]
        else:
            encoded = self.service.intake.encode(prompt, cut=_cuts(params))             # type: ignore[arg-type]
        items: deque[StreamDelta] = deque()
        collector = None
        try:
            with held_interrupts():
                collector = self.service.submit(encoded.tokens, params, prompt=encoded.prompt, salt=encoded.salt)
            collector.listener = items.append
            while items or not collector.finished:
                if not items:
                    self.service.step()
                    continue
                if collector.error:
                    raise PenstockError(f"the model failed on this request: {collector.error}")
                yield items.popleft()
        finally:
            if self._service is not None and collector is not None:
                self._service.abort(collector)

    def _run(self, encoded: Iterable[Encoded], params: Sequence[SamplingParams | None], use_tqdm: UseTqdm,
             priority: Sequence[int] | None) -> list[RequestOutput]:
        batch = Batch(self.service, encoded, params, priority)
        batch.finish(use_tqdm)
        if all(collector.failed for collector in batch.collectors):
            batch.raise_failure()
        return [collector.output() for collector in batch.collectors]

    def _params_for(self, params: Params, count: int) -> list[SamplingParams | None]:
        """One for each prompt; None stands for the model's defaults."""
        if params is None or isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise InvalidRequest(f"sampling_params {shown(params)} are not understood: give SamplingParams, or a list "
                                 "with one for each prompt")
        if len(params) != count:
            raise InvalidRequest(f"{count} prompts came with {len(params)} SamplingParams: give one, or one for each")
        return list(params)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that nobody uses now."""
        self.service.engine.scheduler.cache.tree.clear()

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and what runs now."""
        return self.service.stats()

    def close(self) -> None:
        """Free everything. A second call does nothing."""
        service, self._service = getattr(self, "_service", None), None
        if service is not None:
            service.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _cuts(params: SamplingParams | None) -> bool:
    return params is not None and params.truncate_prompt_tokens is not None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a list of numbers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts of type {type(prompts).__name__} are not understood: give a string, a list of "
                             "token ids, a dict, or a list of those")
    items = list(prompts)
    if items and isinstance(items[0], int):
        return [items]            # type: ignore[list-item]
    return items                  # type: ignore[return-value]


def _template_values(values: Mapping[str, Any] | None) -> Mapping[str, Any]:
    values = {} if values is None else values
    if not isinstance(values, Mapping) or any(not isinstance(key, str) or key == "messages" for key in values):
        raise InvalidRequest(f"chat_template_kwargs={shown(values)} are not understood: give names, other than "
                             "'messages', with their values")
    return values


def _conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """One conversation or several: a list of messages is one."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequest(f"messages={shown(messages)} are not understood: give a list of "
                             "{'role': …, 'content': …}")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)    # type: ignore[list-item, arg-type]
