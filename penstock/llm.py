"""The offline interface, shaped like vLLM's: scripts port by changing the import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.answers import Collector
from penstock.assemble import assemble
from penstock.config import EngineConfig, Setting
from penstock.errors import InvalidRequest, PenstockError
from penstock.intake import Messages, Prompt
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
    """A model in this process. `options` are the fields of EngineConfig."""

    def __init__(self, model: str, *, progress: bool = True, **options: Any) -> None:
        self.model = str(model)
        config = EngineConfig.from_options(**options)
        with loading_bar(progress) as report:
            self._service: Service | None = Service(assemble(self.model, config, show_progress=progress,
                                                             progress=report))

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

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, use_tqdm: bool = True,
                 priority: Sequence[int] | None = None) -> list[RequestOutput]:
        """Complete each prompt: a string, a list of token ids, or {"prompt_token_ids": …}."""
        encoded = [self.service.intake.encode(prompt) for prompt in _as_list(prompts)]
        return self._run(encoded, sampling_params, use_tqdm, priority)

    def chat(self, messages: Messages | Sequence[Messages], sampling_params: Params = None, *, use_tqdm: bool = True,
             add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] | None = None,
             chat_template_kwargs: Mapping[str, Any] | None = None) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        values = dict(chat_template_kwargs or {})
        encoded = [(None, self.service.intake.encode_messages(conversation, add_generation_prompt,  # type: ignore[arg-type]
                                                              tools=tools, **values))
                   for conversation in conversations]
        return self._run(encoded, sampling_params, use_tqdm, None)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt, best first."""
        encoded = [self.service.intake.encode(prompt) for prompt in _as_list(prompts)]
        collectors = [self.service.submit(tokens, params, prompt=prompt) for prompt, tokens in encoded]
        self._finish(collectors, use_tqdm=False)
        return [BeamSearchOutput([self._beam(collector, output.token_ids, output.cumulative_logprob or 0.0,
                                             output.finish_reason)
                                  for output in collector.output().outputs]) for collector in collectors]

    def _beam(self, collector: Collector, output: list[int], score: float, reason: str | None) -> BeamSearchSequence:
        tokens = [*collector.request.tokens, *output]
        return BeamSearchSequence(tokens, score, self.tokenizer.decode(tokens) if self.tokenizer else None, reason)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True,
              truncate_prompt_tokens: int | None = None) -> list[EmbeddingRequestOutput]:
        """One vector per prompt, from an embedding model."""
        params = SamplingParams(truncate_prompt_tokens=truncate_prompt_tokens)
        encoded = [self.service.intake.encode(prompt)[1] for prompt in _as_list(prompts)]
        collectors = self._submit_all([(None, tokens) for tokens in encoded], [params] * len(encoded), None, pool=True)
        self._finish(collectors, use_tqdm)
        return [EmbeddingRequestOutput(c.request.id, list(c.request.tokens), EmbeddingOutput(list(c.embedding or ())))
                for c in collectors]

    def stream(self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None,
               ) -> Iterator[StreamDelta]:
        """Yield each answer's new text as it is made. Closing the iterator aborts the request."""
        intake, text = self.service.intake, None
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            tokens = intake.encode_messages(prompt)       # type: ignore[arg-type]
        else:
            text, tokens = intake.encode(prompt)          # type: ignore[arg-type]
        collector = self.service.submit(tokens, sampling_params or self.service.default_params, prompt=text)
        try:
            while not collector.finished:
                for owner, item in self.service.step():
                    if owner is collector:
                        if collector.error:
                            raise PenstockError(f"the model failed on this request: {collector.error}")
                        yield item
        finally:
            if self._service is not None:
                self._service.abort(collector)

    def _run(self, encoded: Sequence[tuple[str | None, list[int]]], params: Params, use_tqdm: bool,
             priority: Sequence[int] | None) -> list[RequestOutput]:
        each = self._params_for(params, len(encoded))
        collectors = self._submit_all(encoded, each, priority)
        self._finish(collectors, use_tqdm)
        return [collector.output() for collector in collectors]

    def _params_for(self, params: Params, count: int) -> list[SamplingParams]:
        if params is None:
            return [self.service.default_params] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise InvalidRequest(f"{count} prompts came with {len(params)} SamplingParams: give one, or one for each")
        return list(params)

    def _submit_all(self, encoded: Sequence[tuple[str | None, list[int]]], params: Sequence[SamplingParams],
                    priority: Sequence[int] | None, pool: bool = False) -> list[Collector]:
        """All of them, or none: one bad prompt leaves nothing in the queue."""
        priorities = list(priority) if priority is not None else [0] * len(encoded)
        if len(priorities) != len(encoded):
            raise InvalidRequest(f"{len(encoded)} prompts came with {len(priorities)} priorities: give one for each")
        collectors: list[Collector] = []
        try:
            for (prompt, tokens), one, rank in zip(encoded, params, priorities):
                collectors.append(self.service.submit(tokens, one, prompt=prompt, priority=rank, pool=pool))
        except PenstockError:
            for collector in collectors:
                self.service.abort(collector)
            raise
        return collectors

    def _finish(self, collectors: Sequence[Collector], use_tqdm: bool) -> None:
        bar = None
        if use_tqdm:
            from tqdm import tqdm
            bar = tqdm(total=len(collectors), desc="Processed prompts", dynamic_ncols=True)
        try:
            while not all(collector.finished for collector in collectors):
                self.service.step()
                if bar is not None:
                    bar.update(sum(collector.finished for collector in collectors) - bar.n)
        except BaseException:
            for collector in collectors:
                self.service.abort(collector)
            raise
        finally:
            if bar is not None:
                bar.close()
        failed = next((collector.error for collector in collectors if collector.error), None)
        if failed:
            raise PenstockError(f"the model failed on a request: {failed}")

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


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a list of numbers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], int):
        return [items]            # type: ignore[list-item]
    return items                  # type: ignore[return-value]
