"""Ignore unknown keys of a body with a warning, unless they are misspelt or decisive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from penstock.errors import quote

# Clients send these to every OpenAI-like server.
REAL = frozenset(
    """
audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages metadata
modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_options
prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream
stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options
best_of echo prompt suffix
access_programs background context_management conversation image include input instructions max_output_tokens
max_tool_calls personality previous_response_id reasoning text truncation
dimensions encoding_format
cache_control compaction container diagnostics fallbacks inference_geo mcp_servers output_config output_format speed
stop_sequences system thinking thread top_k user_profile_id workspace_id betas

add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template chat_template_kwargs
continue_final_message documents early_stopping ec_transfer_params embed_dtype enable_response_messages guided_choice
guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos include_reasoning
include_stop_str_in_output kv_transfer_params length_penalty logits_processors media_io_kwargs min_p min_tokens
mm_processor_kwargs normalize priority prompt_embeds prompt_logprobs repetition_detection repetition_penalty request_id
return_prompt_text return_token_ids return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens
stop_token_ids stream_interval structural_tag structured_outputs thinking_token_budget truncate_prompt_tokens
truncation_side typical_p use_beam_search vllm_xargs
ebnf regex no_stop_trim lora_path session_params return_hidden_states rid

cache_prompt dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
dynatemp_range grammar grammar_lazy grammar_triggers grammar_type generation_prompt id_slot image_data input_extra
input_prefix input_suffix json_schema lora min_keep mirostat mirostat_eta mirostat_tau multimodal_data n_cache_reuse
n_cmpl n_discard n_indent n_keep n_predict n_probs parse_tool_calls penalize_nl post_sampling_probs preserved_tokens
reasoning_budget_tokens reasoning_control reasoning_format repeat_last_n repeat_penalty response_fields return_progress
return_tokens samplers slot_id sse_ping_interval t_max_predict_ms t_max_prompt_ms tfs_z thinking_forced_open
timings_per_token top_n_sigma typ_p xtc_probability xtc_threshold

context format images keep_alive logits_all embedding_only f16_kv low_vram main_gpu num_batch num_ctx num_gpu num_gqa
num_keep num_predict num_thread numa options penalize_newline raw rope_frequency_base rope_frequency_scale shift
template think truncate use_mlock use_mmap vocab_only width height steps remote

adapter_id decoder_input_details details do_sample inputs max_new_tokens parameters return_full_text tool_prompt
top_n_tokens watermark

debug image_config models plugins preset provider route session_id trace transforms usage top_a verbose
api_base api_key api_version base_url cache custom_llm_provider deployment_id drop_params extra_body extra_headers
fallback_models litellm_call_id litellm_metadata litellm_session_id litellm_trace_id max_retries mock_response
num_retries organization tags
disable_reasoning document_ids enable_search enable_thinking exclude_domains guardrails include_domains partial
prefix presence_context_penalty prompt_mode random_seed reasoning_split safe_prompt safety_model safety_settings
search_parameters stop_strings thinking_budget tool_stream
""".split()
)
NO_MEDIA = "models here read text only; leave it out"
_ADAPTER = "give an adapter's name as the model"
_NO_BEAMS = "give use_beam_search and n to /v1/completions or /v1/chat/completions"
_LENGTH = "give max_tokens"
_STOP = "give stop"
_FORM = "give response_format or structured_outputs"
_MESSAGE = "say it in a message, or in the prompt"
# Fields that change the output, and what to send instead.
DECISIVE: Mapping[str, str] = {
    "adapter_id": _ADAPTER,
    "lora": _ADAPTER,
    "lora_request": _ADAPTER,
    "images": NO_MEDIA,
    "image_data": NO_MEDIA,
    "multimodal_data": NO_MEDIA,
    "use_beam_search": _NO_BEAMS,  # where a body has no such field
    "num_beams": _NO_BEAMS,
    "max_new_tokens": _LENGTH,
    "max_length": _LENGTH,
    "num_predict": _LENGTH,
    "max_output_tokens": _LENGTH,
    "stop_sequences": _STOP,
    "stop_strings": _STOP,
    "stop_words": _STOP,
    "format": _FORM,
    "json_mode": _FORM,
    "system": _MESSAGE,
    "system_prompt": _MESSAGE,
    "instructions": _MESSAGE,
    "do_sample": "answers are sampled; give temperature=0 for the likeliest tokens",
    "echo": "only /v1/completions echoes prompts; leave it out",
    "enable_thinking": "give chat_template_kwargs={'enable_thinking': …}",
    "custom_logit_processor": "the server runs no code of requests; give logit_bias, allowed_token_ids or bad_words",
    "stop_regex": "give stop, or a regex for the whole answer",
    "grammar_lazy": "a grammar applies from the first token; give tools",
    "logit_processors": "the server runs no code of requests; give logit_bias, allowed_token_ids or bad_words",
    "logits_processors": "the server runs no code of requests; give logit_bias, allowed_token_ids or bad_words",
    "options": "give its values as fields of their own",
    "plugins": "the server runs none; leave it out",
    "prompt_embeds": "give the prompt as text or token ids",
    "random_seed": "give seed",
    "search_parameters": "the server does not search the web; leave it out",
}
# values without effect, besides null, false, 0 and empty ones
NEUTRAL: Mapping[str, Any] = {"num_beams": 1}
MAX_KEYS = 8  # unknown keys per body that are judged and named
MAX_KEY_CHARS = 40  # a longer key is not taken for a misspelling
MAX_EDITS = 2
CHARS_PER_EDIT = 2  # min length per allowed edit: "stp" one, "n" none
UNKNOWN, UNSUPPORTED = "unknown_key", "unsupported_key"  # error types


def find_objection(key: str, value: Any, decisive: Mapping[str, str] = DECISIVE) -> str | None:
    """Say why an unsupported field cannot be ignored; None if it can."""
    why = decisive.get(key)
    if key == "do_sample":
        return why if value is False else None
    return why if value and value != NEUTRAL.get(key) else None


@dataclass
class UnknownKeys:
    """Unknown keys of one body; with `refuses` each is an error."""

    refuses: bool = False
    names: dict[str, None] = field(default_factory=dict)
    has_more: bool = False  # keys beyond `names`
    _judged: set[tuple[frozenset[str], str]] = field(default_factory=set)

    def judge(
        self, values: Mapping[str, Any], known: frozenset[str], decisive: Mapping[str, str], passed: frozenset[str]
    ) -> list[str]:
        """Return the keys to ignore; raise for the first that is misspelt or decisive."""
        found = list(islice(_find_unknown(values, known | passed if passed else known), MAX_KEYS + 1))
        for key in found[:MAX_KEYS]:
            self._judge(key, values[key], known, decisive)
        return found

    def _judge(self, key: str, value: Any, known: frozenset[str], decisive: Mapping[str, str]) -> None:
        if (known, key) not in self._judged and len(self._judged) >= MAX_KEYS:
            return
        self._judged.add((known, key))
        why = find_objection(key, value, decisive)
        if why is not None:
            raise _make_error(UNSUPPORTED, key, why)
        meant = find_meant(key, known)
        if meant is not None:
            raise _make_error(UNKNOWN, key, meant)

    def add(self, keys: list[str]) -> None:
        for key in keys:
            if key in self.names or len(self.names) < MAX_KEYS:
                self.names[key] = None
            else:
                self.has_more = True

    def make_warning(self) -> str | None:
        if not self.names:
            return None
        names = ", ".join(map(quote, self.names)) + (" and more" if self.has_more else "")
        return f"unknown fields were ignored: {names}"


def refuse_unknown(values: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise for the first unknown key, whatever its value."""
    key = next((one for one in values if one not in known), None)
    if key is not None:
        raise _make_error(UNKNOWN, key, find_meant(key, known) or "")


def _find_unknown(values: Mapping[str, Any], known: frozenset[str]) -> Iterator[str]:
    """Yield unknown keys; null values are ignored."""
    return (key for key, value in values.items() if key not in known and value is not None)


def _make_error(kind: str, key: str, detail: str) -> ValidationError:
    error = PydanticCustomError(kind, "{told}", {"told": detail})
    return ValidationError.from_exception_data("body", [InitErrorDetails(type=error, loc=(key,), input=None)])


def find_meant(key: str, known: frozenset[str]) -> str | None:
    """Find the known key that `key` misspells; fields of other APIs do not count."""
    return None if len(key) > MAX_KEY_CHARS or key in REAL else _find(key, known)


@lru_cache(maxsize=1024)
def _find(key: str, known: frozenset[str]) -> str | None:
    plain = _normalize(key)
    found = [(0, one) for one in known if _normalize(one) == plain]
    for one in known:
        max_edits = min(MAX_EDITS, (min(len(key), len(one)) - 1) // CHARS_PER_EDIT)
        # an edit changes at most two characters
        if abs(len(one) - len(key)) <= max_edits and len(set(one) ^ set(key)) <= 2 * max_edits:
            edits = count_edits(key, one)
            found += [(edits, one)] if edits <= max_edits else []
    return min(found, default=(0, None))[1]


def _normalize(key: str) -> str:
    """Remove what spellings of a name differ in: maxTokens, max-tokens."""
    return key.replace("_", "").replace("-", "").lower()


def count_edits(first: str, two: str) -> int:
    """Count insertions, deletions, changes and swaps between two keys; MAX_EDITS + 1 if more."""
    far = MAX_EDITS + 1
    before: list[int] = []
    above = [min(far, column) for column in range(len(two) + 1)]
    for at in range(1, len(first) + 1):
        row = [min(far, at)] + [far] * len(two)
        for column in range(max(1, at - MAX_EDITS), min(len(two), at + MAX_EDITS) + 1):
            row[column] = min(
                above[column] + 1, row[column - 1] + 1, above[column - 1] + (first[at - 1] != two[column - 1]), far
            )
            if at > 1 and column > 1 and first[at - 2 : at] == two[column - 1] + two[column - 2]:
                row[column] = min(row[column], before[column - 2] + 1)
        if min(row) >= far:
            return far
        before, above = above, row
    return above[-1]
