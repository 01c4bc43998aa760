"""Fields that llama-server's own routes share, and the settings that their answers report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from penstock.errors import InvalidRequest
from penstock.server.common.fields import MAX_BIASES, MAX_INT32, OFF, SamplingBody, make_sampling_params
from penstock.server.common.structured_outputs import StructuredOutputsBody, read_constraint
from penstock.server.http.unknown_keys import DECISIVE
from penstock.server.model import ServedModel
from penstock.types import Request, SamplingParams

MAX_PROBS = 64
MAX_FIELDS = 256  # of response_fields
MAX_BIAS_TEXTS = 256
RANDOM_SEED = 2**32 - 1  # llama-server's seed for a new one each time
# in its names → in ours
SETTINGS = {
    "temperature": "temperature",
    "dynatemp_range": "dynatemp_range",
    "dynatemp_exponent": "dynatemp_exponent",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "top_n_sigma": "top_n_sigma",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "dry_multiplier": "dry_multiplier",
    "dry_base": "dry_base",
    "dry_allowed_length": "dry_allowed_length",
    "dry_penalty_last_n": "dry_penalty_last_n",
    "dry_sequence_breakers": "dry_sequence_breakers",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
    "ignore_eos": "ignore_eos",
}


def _read_temperature(value: Any) -> Any:
    """Take a temperature below 0 for greedy, as llama-server does."""
    return 0.0 if isinstance(value, (int, float)) and value < 0 else value


def _read_seed(value: Any) -> Any:
    return -1 if value == RANDOM_SEED else value


class NativeBody(SamplingBody, StructuredOutputsBody):
    """Sampling and output of llama-server's own routes."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"n_cache_reuse", "n_discard", "n_keep", "slot_id", "sse_ping_interval", "t_max_prompt_ms"}
    )
    DECISIVE: ClassVar[Mapping[str, str]] = {
        **DECISIVE,
        "n_indent": "lines are not indented by force; give a grammar",
        "min_keep": "filters keep as many tokens as they find; leave it out",
    }
    temperature: Annotated[float, BeforeValidator(_read_temperature)] | None = Field(None, ge=0, le=1e6)
    seed: Annotated[int, BeforeValidator(_read_seed)] | None = Field(None, ge=-(2**63), lt=2**64)
    n_predict: int | None = Field(None, ge=-2, le=MAX_INT32)  # 0: only compute the prompt
    max_tokens: int | None = Field(None, ge=-2, le=MAX_INT32)
    n_probs: int | None = Field(None, ge=0, le=MAX_PROBS)
    return_tokens: bool = False
    t_max_predict_ms: int = Field(0, ge=-1, le=MAX_INT32)  # since the first token, after a new line; 0: no limit
    response_fields: list[Annotated[str, Field(max_length=256)]] | None = Field(None, max_length=MAX_FIELDS)

    @property
    def max_output(self) -> int | None:
        return None if self.max_tokens is None or self.max_tokens < 0 else max(1, self.max_tokens)


async def make_native_params(body: NativeBody, model: ServedModel, tenant: str) -> SamplingParams:
    await _encode_biases(body, model, tenant)
    return make_sampling_params(
        body,
        model.defaults,
        max_tokens=body.max_output,
        logprobs=body.n_probs or None,
        structured_outputs=read_constraint(body),
    )


async def _encode_biases(body: NativeBody, model: ServedModel, tenant: str) -> None:
    """Replace the texts of `logit_bias` by all their tokens."""
    texts = [key for key in body.logit_bias or () if not (key.isascii() and key.isdigit())]
    if not texts or body.logit_bias is None:
        return
    if len(texts) > MAX_BIAS_TEXTS:
        raise InvalidRequest(f"logit_bias has {len(texts)} texts: the limit is {MAX_BIAS_TEXTS}; give token ids")
    biases = {key: bias for key, bias in body.logit_bias.items() if key not in texts}
    for key in texts:
        encoded = await model.text.encode(key, add_special_tokens=False, tenant=tenant, may_be_empty=True)
        biases |= {str(id): body.logit_bias[key] for id in encoded.tokens}
    if len(biases) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias has {len(biases)} tokens: the limit is {MAX_BIASES}; give fewer texts")
    body.logit_bias = biases


def format_settings(sampling: SamplingParams) -> dict[str, Any]:
    """Format sampling parameters in llama-server's names."""
    return {
        **{name: getattr(sampling, own) for name, own in SETTINGS.items()},
        "repeat_last_n": -1 if sampling.repeat_last_n is None else sampling.repeat_last_n,
        "stop": list(sampling.stop or ()),
        "n_probs": sampling.logprobs or 0,
        "post_sampling_probs": sampling.post_sampling_probs,
        "samplers": list(OFF),
        "grammar": "" if sampling.structured_outputs is None else sampling.structured_outputs.grammar or "",
        "logit_bias": [{"token": id, "bias": bias} for id, bias in (sampling.logit_bias or {}).items()],
    }


def format_request_settings(request: Request, body: NativeBody, max_output: int | None) -> dict[str, Any]:
    """Format what a request was answered with; `max_output` bounds every answer of the server."""
    settings = format_settings(request.sampling)
    if request.sampling.ignore_eos:
        settings["logit_bias"] += [{"token": id, "bias": None} for id in request.eos_token_ids]
    asked = -1 if body.max_tokens is None or body.max_tokens < 0 else body.max_tokens
    if max_output is not None:
        asked = max_output if asked < 0 else min(asked, max_output)
    return {
        **settings,
        "seed": request.seed,
        "n_predict": asked,
        "max_tokens": asked,
        "stream": body.stream,
        "timings_per_token": body.timings_per_token,
        "speculation": request.sampling.speculation is not False,
    }
