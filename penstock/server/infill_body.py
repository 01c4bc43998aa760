"""The body of llama-server's /infill."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from penstock.server.fields import WHOLE, Body, SamplingBody
from penstock.server.structure import StructureBody
from penstock.text.infill import Gap

MAX_FILES = 1024
MAX_NAME_CHARS = 4096


class InfillFile(Body):
    """Another file, which stands before the text."""

    IS_LOOSE: ClassVar[bool] = True  # editors send when they saw it, and more
    text: str
    filename: str = Field("tmp", max_length=MAX_NAME_CHARS)


class InfillBody(SamplingBody, StructureBody):
    """`prompt` follows the prefix: what the writer has typed since."""

    PASSED: ClassVar[frozenset[str]] = frozenset({"n_cache_reuse", "n_keep", "t_max_prompt_ms"})
    input_prefix: str
    input_suffix: str
    input_extra: list[InfillFile] = Field([], max_length=MAX_FILES)
    prompt: str = ""
    n_predict: int | None = Field(None, ge=-2, le=WHOLE)  # 0: the prompt is computed, and nothing is said
    max_tokens: int | None = Field(None, ge=-2, le=WHOLE)
    return_tokens: bool = False

    @field_validator("n")
    @classmethod
    def _one(cls, n: int | None) -> int | None:
        if n not in (None, 1):
            raise ValueError(f"n={n} is not supported here: ask {n} times, or /v1/completions with a suffix")
        return n

    @property
    def gap(self) -> Gap:
        return Gap(
            self.input_prefix + self.prompt,
            self.input_suffix,
            tuple((file.filename, file.text) for file in self.input_extra),
        )

    @property
    def num_answer(self) -> int | None:
        """Tokens of the answer; None where they are not given."""
        return None if self.max_tokens is None or self.max_tokens < 0 else max(1, self.max_tokens)
