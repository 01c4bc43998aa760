"""Fields of other APIs: real names, so never misspellings of ours, and those without which an answer is another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Clients send these to every server that speaks a like API.
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

_NO_MEDIA = "models here read text only; leave it out"
_NO_ADAPTERS = "this server has no adapters; leave it out"
_NO_BEAMS = "the server searches no beams; leave it out"
_LENGTH = "give max_tokens"
_STOP = "give stop"
_FORM = "give response_format or structured_outputs"
_MESSAGE = "say it in a message, or in the prompt"

# What an answer would be another one without, and what to send instead.
DECISIVE: Mapping[str, str] = {
    "adapter_id": _NO_ADAPTERS,
    "lora": _NO_ADAPTERS,
    "lora_path": _NO_ADAPTERS,
    "lora_request": _NO_ADAPTERS,
    "images": _NO_MEDIA,
    "image_data": _NO_MEDIA,
    "multimodal_data": _NO_MEDIA,
    "use_beam_search": _NO_BEAMS,
    "num_beams": _NO_BEAMS,
    "max_new_tokens": _LENGTH,
    "max_length": _LENGTH,
    "num_predict": _LENGTH,
    "max_output_tokens": _LENGTH,
    "stop_sequences": _STOP,
    "stop_strings": _STOP,
    "stop_words": _STOP,
    "regex": _FORM,
    "ebnf": _FORM,
    "format": _FORM,
    "json_mode": _FORM,
    "system": _MESSAGE,
    "system_prompt": _MESSAGE,
    "instructions": _MESSAGE,
    "do_sample": "answers are sampled; give temperature=0 for the likeliest tokens",
    "echo": "prompts are told again by /v1/completions alone; leave it out",
    "enable_thinking": "give chat_template_kwargs={'enable_thinking': …}",
    "grammar_lazy": "a grammar holds from the first token on; give tools",
    "logit_processors": "no program of a request is run; give logit_bias, allowed_token_ids or bad_words",
    "logits_processors": "no program of a request is run; give logit_bias, allowed_token_ids or bad_words",
    "options": "give its values as fields of their own",
    "plugins": "the server runs none; leave it out",
    "prompt_embeds": "give the prompt as text or token ids",
    "random_seed": "give seed",
    "search_parameters": "the server does not search the web; leave it out",
}
# besides null, false, 0 and what is empty
ASKS_NOTHING: Mapping[str, Any] = {"num_beams": 1}


def why_decisive(key: str, value: Any, decisive: Mapping[str, str] = DECISIVE) -> str | None:
    """Why a field that is not implemented cannot be passed over; None where it can."""
    why = decisive.get(key)
    if key == "do_sample":
        return why if value is False else None
    return why if value and value != ASKS_NOTHING.get(key) else None
