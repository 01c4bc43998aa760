"""Embeddings of texts, and their similarity."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.api.prompts import AnyLora, cuts, spread_loras
from penstock.api.service import Batch, Service, UseTqdm
from penstock.errors import InvalidRequest
from penstock.outputs import PoolingOutput, PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from penstock.text.prompt_encoder import Prompt
from penstock.types import EmbeddingOutput, EmbeddingRequestOutput, SamplingParams
from penstock.types.output import cosine


def embed(
    service: Service,
    prompts: Sequence[Prompt],
    use_tqdm: UseTqdm = True,
    truncate_prompt_tokens: int | None = None,
    lora_request: AnyLora | Sequence[AnyLora] = None,
) -> list[EmbeddingRequestOutput]:
    """Return one vector per prompt. `truncate_prompt_tokens` keeps a prompt's beginning."""
    params = SamplingParams(truncate_prompt_tokens=truncate_prompt_tokens)
    intake = service.intake
    encoded = [intake.encode(prompt, cut=cuts(params)) for prompt in prompts]
    if truncate_prompt_tokens is not None:
        encoded = [intake.keep_beginning(one, truncate_prompt_tokens) for one in encoded]
    loras = spread_loras(lora_request, len(encoded))
    batch = Batch(service, encoded, [params] * len(encoded), pool=True, loras=loras)
    batch.finish(use_tqdm)
    batch.raise_failure()
    return [
        EmbeddingRequestOutput(c.request.id, list(c.request.tokens), EmbeddingOutput(list(c.embedding or ())))
        for c in batch.collectors
    ]


def as_tensors(outputs: Sequence[EmbeddingRequestOutput]) -> list[PoolingRequestOutput]:
    import torch

    return [
        PoolingRequestOutput(one.request_id, one.prompt_token_ids, PoolingOutput(torch.tensor(one.outputs.embedding)))
        for one in outputs
    ]


def score(
    service: Service,
    first: Sequence[Prompt],
    second: Sequence[Prompt],
    use_tqdm: UseTqdm = True,
    truncate_prompt_tokens: int | None = None,
    lora_request: AnyLora = None,
) -> list[ScoringRequestOutput]:
    """Return the cosine similarity of each pair; one `first` is paired with each of `second`."""
    if not first or not second or len(first) not in (1, len(second)):
        raise InvalidRequest(f"{len(first)} texts came with {len(second)} to compare them with: give one, or as many")
    vectors = embed(service, [*first, *second], use_tqdm, truncate_prompt_tokens, lora_request)
    ones, twos = vectors[: len(first)], vectors[len(first) :]
    return [_pair(ones[index % len(ones)], two) for index, two in enumerate(twos)]


def _pair(output: EmbeddingRequestOutput, two: EmbeddingRequestOutput) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        f"{output.request_id}_{two.request_id}",
        [*output.prompt_token_ids, *two.prompt_token_ids],
        ScoringOutput(cosine(output.outputs.embedding, two.outputs.embedding)),
    )
