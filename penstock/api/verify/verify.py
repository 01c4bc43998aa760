"""Verify a loaded model, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from penstock.api.verify.finding import Finding
from penstock.api.verify.layers import compare_layers, compute_reference, name_storage
from penstock.api.verify.ops import watch_ops
from penstock.api.verify.prompts import compare_prompts
from penstock.errors import InvalidRequest
from penstock.models.decoder import Decoder
from penstock.models.files import open_checkpoint
from penstock.types import SamplingParams

if TYPE_CHECKING:
    from penstock.api.llm import LLM


def verify(llm: LLM) -> Iterator[Finding]:
    """Yield what each comparison finds; ops first, for theirs are the plainest names."""
    assembly, settings = llm.service.assembly, llm.service.assembly.settings
    if assembly.spec.is_encoder:
        raise InvalidRequest("verify compares models that answer; this one makes embeddings")
    has_weights = settings.load_format != "dummy"
    checkpoint = open_checkpoint(assembly.path) if has_weights else None
    try:
        with torch.inference_mode():
            with watch_ops(settings.device) as watch:
                llm.generate(
                    [{"prompt_token_ids": [at % 97 + 3 for at in range(70)]}], _PARAMS, use_tqdm=False
                )  # too large for a tape
                model = getattr(assembly.engine.executor, "model", None)
                layers = list(compare_layers(model, checkpoint, settings)) if isinstance(model, Decoder) else []
            yield from watch.findings()
            yield from layers
            storage = name_storage(settings, checkpoint)
            reference = partial(compute_reference, checkpoint, assembly.spec, settings)
            is_exact = settings.device == "cpu" or settings.deterministic
            yield from compare_prompts(llm, reference, storage, is_exact)
    finally:
        if checkpoint is not None:
            checkpoint.close()


_PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
