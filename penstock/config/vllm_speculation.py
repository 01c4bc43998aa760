"""vLLM's JSON for speculative decoding as users have it: other spellings, and fields that change nothing here."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from penstock.errors import InvalidConfig, quote

_log = logging.getLogger(__name__)

OPTION = "speculative_config"
OFF, AUTO = "off", "auto"
SAID_AUTO = "{}"  # all defaults
OFF_SPELLINGS = (OFF, "none", "null", "false")
MTP = re.compile(r"[a-z0-9_]+_mtp")  # vLLM has a method for each family's layer: deepseek_mtp, mimo_mtp, …
NGRAM = ("[ngram]", "ngram", "ngram_gpu")

# Taken at any value: drafts are verified whatever it is, so no answer changes.
HARMLESS = {
    **dict.fromkeys(
        ("suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
        "drafts are cut where they stop paying, as measured",
    ),
    **dict.fromkeys(
        ("enforce_eager", "disable_padded_drafter_batch", "disable_mqa_scorer", "use_local_argmax_reduction"),
        "it concerns vLLM's kernels",
    ),
    "disable_logprobs": "log probabilities are told if a request asks for them",
    "max_model_len": "a drafting model takes as many tokens as it was made for",
    "code_revision": "a checkpoint's code is never run",
}
# Taken at these values, with the reason why others are not.
LIMITED: dict[str, tuple[tuple[Any, ...], str]] = {
    "draft_tensor_parallel_size": ((1,), "a drafting model is not cut over ranks: set it to 1, or leave it out"),
    "tensor_parallel_size": ((), "the model's ranks are set by the option of this name beside speculative_config"),
    "quantization": ((), "a drafting model is stored as its files are: leave it out"),
    "parallel_drafting": ((False,), "tokens are drafted one after the other: leave it out"),
    "speculative_token_tree": ((), "trees grow where they are likely: set tree to true"),
    "draft_load_config": ((), "a drafting model is read as the model is: leave it out"),
    "acceptance_method": (
        ("rejection_sampler",),
        "answers would no longer have the model's distribution: leave it out",
    ),
    "rejection_sample_method": (("strict",), "verification is exact: leave it out, or set verification"),
    **dict.fromkeys(
        ("posterior_threshold", "posterior_alpha", "typical_acceptance_sampler_posterior_threshold"),
        ((), "tokens are accepted only if the model draws them: leave it out"),
    ),
}


def spell_option(given: Any) -> Any:
    """Return the option in its own spelling: `off` for none, and SAID_AUTO for `auto`, since a user who says it asks
    for drafts on a GPU too."""
    if isinstance(given, Mapping):
        return json.dumps(dict(given), default=str)
    if given is None or given is False:
        return OFF
    text = given.strip() if isinstance(given, str) else given
    if isinstance(text, str) and text.lower() in OFF_SPELLINGS:
        return OFF
    return SAID_AUTO if text == AUTO else text


def port_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are known here among those of vLLM's JSON; null stands for a default."""
    ported: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in HARMLESS:
            _tell(name, quote(value), HARMLESS[name])
        elif name in LIMITED:
            taken, why = LIMITED[name]
            if not any(value == one and type(value) is type(one) for one in taken):
                raise InvalidConfig(f"{OPTION}: {name}={quote(value)} is not supported: {why}")
        else:
            ported[name] = value
    if ported.get("method") in NGRAM or "method" not in ported and ported.get("model") in NGRAM:
        ported["method"] = "ngram"
    if ported.get("method") == "ngram" and ported.get("model") in NGRAM:
        del ported["model"]
    if isinstance(method := ported.get("method"), str) and MTP.fullmatch(method):
        ported["method"] = "mtp"
    return ported


@lru_cache(maxsize=64)
def _tell(name: str, value: str, why: str) -> None:
    _log.info("%s: %s=%s has no effect: %s", OPTION, name, value, why)
