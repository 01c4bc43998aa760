"""Tensors that adapters have beside low-rank matrices: DoRA's magnitudes, whole tensors and rows of trained tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.models.lora.config import LoraConfig

PREFIX = "base_model.model."
LOW_RANK = re.compile(r"\.lora_(embedding_)?[AB](\.|$)")
MAGNITUDE = re.compile(r"\.lora_magnitude_vector(\.default)?(\.weight)?$")
TOKENS = re.compile(r"(\.token_adapter)?\.trainable_tokens_delta(\.default)?$")
WRAPPED = re.compile(r"\.(base_layer|modules_to_save(\.default)?)(?=\.(weight|bias)$)")
COPY = re.compile(r"\.base_layer\.weight$")  # peft saves embeddings beside their adapters


@dataclass(frozen=True)
class Extra:
    """A tensor and the base's that it is for: of a magnitude the matrix, of trained tokens the embedding."""

    kind: Literal["magnitude", "tokens", "whole"]
    name: str


def find_extras(names: Iterable[str], config: LoraConfig) -> dict[str, Extra]:
    """Find the tensors that are no low-rank matrices, by their names in the file."""
    found: dict[str, Extra] = {}
    for name in names:
        inner = name.removeprefix(PREFIX)
        if LOW_RANK.search(inner) or COPY.search(inner):
            continue
        if MAGNITUDE.search(inner):
            found[name] = Extra("magnitude", MAGNITUDE.sub(".weight", inner))
        elif TOKENS.search(inner):
            found[name] = Extra("tokens", TOKENS.sub(".weight", inner))
        elif not inner.endswith(".base_layer.bias") or config.has_biases:
            found[name] = Extra("whole", WRAPPED.sub("", inner))
    return found
