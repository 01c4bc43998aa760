"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field, model_validator

from penstock.server.fields import MOST_TOP_LOGPROBS, WHOLE, SamplingBody
from penstock.server.structure import StructureBody

MOST_PROMPTS = 2048
MOST_GAPS = 64  # prompts with a suffix, which is encoded for each
DEFAULT_TOKENS = 16

Kind = TypeVar("Kind")
Several = Annotated[list[Kind], Field(max_length=MOST_PROMPTS)]


class CompletionBody(SamplingBody, StructureBody):
    prompt: str | list[int] | Several[str] | Several[list[int]]
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    max_tokens: int | None = Field(DEFAULT_TOKENS, ge=-2, le=WHOLE)  # below 0: as many as fit
    suffix: str | None = None
    add_special_tokens: bool = True
    thinking_token_budget: int | None = Field(None, ge=-1, le=WHOLE)

    @model_validator(mode="after")
    def _possible(self) -> CompletionBody:
        if self.n_probs and self.logprobs is None:
            self.logprobs = self.n_probs
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts()):
            raise ValueError("suffix needs a prompt that is a text: token ids cannot be filled in between")
        if self.suffix and len(self.prompts()) > MOST_GAPS:
            raise ValueError(f"{len(self.prompts())} prompts with a suffix: the limit is {MOST_GAPS}; send fewer")
        if self.suffix and self.echo:
            raise ValueError("echo is not supported with a suffix: the prompt is not the text before the answer alone")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise ValueError(
                f"best_of={self.best_of} over n={self.n or 1} cannot be streamed, because the best are "
                "known at the end only"
            )
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"best_of={self.best_of} is below n={self.n}")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 gives nothing without echo=true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        if isinstance(self.prompt, list) and len(self.prompt) == 0:
            raise ValueError("the prompt is empty: give a text or a list of token ids")
        return self

    def prompts(self) -> list[str | list[int]]:
        """One prompt or several: a list of numbers is one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]
