"""Prompts as dicts, under vLLM's module name."""

from __future__ import annotations

from typing import TypedDict

from penstock.text.prompt_encoder import Prompt as PromptType

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]


class _Salted(TypedDict, total=False):
    cache_salt: str


class TextPrompt(_Salted):
    prompt: str


class TokensPrompt(_Salted):
    prompt_token_ids: list[int]
