"""The offline interface, shaped like vLLM's: scripts port by changing the import."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from penstock.api import embedding
from penstock.api.assemble import assemble
from penstock.api.engine.sessions import SavedSessions
from penstock.api.prompts import (
    AnyLora,
    Params,
    check_content_format,
    cuts,
    list_conversations,
    list_params,
    list_prompts,
    spread_loras,
    template_values,
)
from penstock.api.service import Batch, Service, UseTqdm
from penstock.api.vllm.porting import ABSENT, check_task, port_options
from penstock.config import EngineConfig, Setting
from penstock.errors import InvalidRequest, PenstockError, quote
from penstock.host.interrupts import held_interrupts
from penstock.host.progress import loading_bar
from penstock.host.session_records import SessionRecords
from penstock.text.prompt_encoder import Encoded, Messages, Prompt
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.types import (
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    CompletionOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    SamplingParams,
    StreamDelta,
)

if TYPE_CHECKING:
    from penstock.api.vllm.llm_engine import LLMEngine
    from penstock.api.vllm.porting import EngineArgs
    from penstock.outputs import PoolingRequestOutput, ScoringRequestOutput
    from penstock.text.pretrained import PretrainedTokenizer

Loras = AnyLora | Sequence[AnyLora]  # for all prompts, or for each


class LLM:
    """A model in this process. `options` are the fields of EngineConfig, or vLLM's if they change nothing. Use it
    from one thread at a time."""

    def __init__(self, model: str, *, progress: bool = True, draft_fn: Any = None, **options: Any) -> None:
        """`draft_fn`: from token ids so far to draft token ids, see docs/speculation.md."""
        self.model, self._draft_fn = str(model), draft_fn
        self._config = EngineConfig.from_options(**port_options(options))
        self._progress = progress
        self._records = SessionRecords(self._config.kv_offloading_path)
        self._service: Service | None = None
        self._asleep = False
        self._load()
        check_task(options, self.service.assembly.spec.is_encoder, self.model)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        return cls(**vars(engine_args))

    def _load(self) -> None:
        with loading_bar(self._progress) as report:
            self._service = Service(
                assemble(
                    self.model,
                    self._config,
                    show_progress=self._progress,
                    progress=report,
                    offline=True,
                    draft_fn=self._draft_fn,
                )
            )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"LLM has no {name!r}" + (f": {ABSENT[name]}" if name in ABSENT else ""))

    @property
    def service(self) -> Service:
        if self._service is None:
            raise PenstockError(
                "this LLM is asleep: call wake_up()" if self._asleep else "this LLM is closed: make a new one"
            )
        return self._service

    @cached_property
    def llm_engine(self) -> LLMEngine:
        """The same model for scripts that call `step` themselves."""
        from penstock.api.vllm.llm_engine import LLMEngine

        return LLMEngine(self)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.service.tokenizer

    def get_tokenizer(self) -> PretrainedTokenizer | None:
        """Return the model's tokenizer with the interface of transformers."""
        from penstock.text.pretrained import PretrainedTokenizer

        return None if self.tokenizer is None else PretrainedTokenizer(self.tokenizer)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Every option with its value and the reason for it."""
        return self.service.assembly.settings.settings

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of a request that sets none; `penstock info` says where they come from."""
        return self.service.default_params.clone()

    get_default_sampling_params = default_sampling_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: Sequence[Any] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Loras = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: a string, a list of token ids, or {"prompt_token_ids": …}.

        A request that fails has finish_reason="error" and does not affect the others; if all fail, the reason is
        raised.
        """
        items = list_prompts(prompts, prompt_token_ids)
        params = list_params(sampling_params, len(items))
        encoded = (self.service.intake.encode(item, cut=cuts(one)) for item, one in zip(items, params))
        return self._run(encoded, params, use_tqdm, priority, lora_request)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        lora_request: Loras = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template or the given one."""
        conversations = list_conversations(messages)
        check_content_format(chat_template_content_format, conversations)
        params = list_params(sampling_params, len(conversations))
        values = {
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "continue_final_message": continue_final_message,
            **template_values(chat_template_kwargs),
        }
        encoded = (
            self.service.intake.encode_messages(conversation, values, cut=cuts(one), template=chat_template)
            for conversation, one in zip(conversations, params)
        )
        return self._run(encoded, params, use_tqdm, None, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: Loras = None,
        use_tqdm: UseTqdm = False,
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` best continuations of each prompt, best first."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"params of type {type(params).__name__} are not supported: give BeamSearchParams")
        encoded = [self.service.intake.encode(prompt) for prompt in list_prompts(prompts)]
        loras = spread_loras(lora_request, len(encoded))
        batch = Batch(self.service, encoded, [params] * len(encoded), loras=loras)
        batch.finish(use_tqdm)
        batch.raise_failure()
        return [
            BeamSearchOutput(
                [_make_beam(self.tokenizer, collector.request.tokens, output) for output in collector.output().outputs]
            )
            for collector in batch.collectors
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Loras = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return one vector per prompt from an embedding model. `truncate_prompt_tokens` keeps a prompt's beginning."""
        return embedding.embed(self.service, list_prompts(prompts), use_tqdm, truncate_prompt_tokens, lora_request)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_task: str | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Loras = None,
    ) -> list[PoolingRequestOutput]:
        """Like `embed`, with the vectors as tensors."""
        if pooling_task not in (None, "embed"):
            raise InvalidRequest(f"pooling_task={quote(pooling_task)} is not supported: models pool to embeddings only")
        return embedding.as_tensors(self.embed(prompts, use_tqdm=use_tqdm, lora_request=lora_request))

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        use_tqdm: UseTqdm = True,
        lora_request: AnyLora = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the cosine similarity of two texts, of one and several, or of several pairs, by an embedding model."""
        return embedding.score(
            self.service, list_prompts(data_1), list_prompts(data_2), use_tqdm, truncate_prompt_tokens, lora_request
        )

    def stream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None, *, lora_request: AnyLora = None
    ) -> Iterator[StreamDelta]:
        """Yield each answer's new text as it is generated. Closing the iterator aborts the request."""
        params = self.service.streamable(sampling_params)
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            encoded = self.service.intake.encode_messages(prompt, cut=cuts(params))  # type: ignore[arg-type]
        else:
            encoded = self.service.intake.encode(prompt, cut=cuts(params))  # type: ignore[arg-type]
        items: deque[StreamDelta] = deque()
        collector = None
        try:
            with held_interrupts():
                collector = self.service.submit(encoded, params, lora=lora_request)
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

    def _run(
        self,
        encoded: Iterable[Encoded],
        params: Sequence[SamplingParams | None],
        use_tqdm: UseTqdm,
        priority: Sequence[int] | None,
        lora_request: Loras,
    ) -> list[RequestOutput]:
        loras = spread_loras(lora_request, len(params))
        batch = Batch(self.service, encoded, params, priority, loras=loras)
        batch.finish(use_tqdm)
        if all(collector.failed for collector in batch.collectors):
            batch.raise_failure()
        return [collector.output() for collector in batch.collectors]

    @property
    def sessions(self) -> SavedSessions:
        """Sessions by the names that SamplingParams give: `save`, `restore` and `erase` them."""
        return SavedSessions(self.service, self._records)

    def reset_prefix_cache(self) -> bool:
        """Drop every cached prefix that is not in use, and saved sessions; True if none is in use."""
        self._records.forget()
        self.service.engine.forget_prefixes()
        return not self.service.engine.has_work

    def sleep(self, level: int = 1) -> None:
        """Free the weights and the cache until `wake_up`; any level frees both."""
        if self.service.engine.has_work:
            raise PenstockError("requests are unfinished: finish or abort them before sleep()")
        self.service.close()
        self._service, self._asleep = None, True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load the model again, with an empty cache."""
        if tags is not None:
            raise InvalidRequest(f"tags={list(tags)} are not supported: a model wakes up as a whole; leave them out")
        if self._asleep:
            self._load()
            self._asleep = False

    def stats(self) -> dict[str, Any]:
        """Return counters since the start, and what runs now."""
        return self.service.stats()

    def close(self) -> None:
        """Free everything; idempotent."""
        service, self._service = getattr(self, "_service", None), None
        if service is not None:
            service.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then modules are half gone, and the process frees everything
            self.close()


def _make_beam(tokenizer: Tokenizer | None, prompt: Sequence[int], output: CompletionOutput) -> BeamSearchSequence:
    tokens, score = [*prompt, *output.token_ids], output.cumulative_logprob or 0.0
    return BeamSearchSequence(tokens, score, tokenizer.decode(tokens) if tokenizer else None, output.finish_reason)
