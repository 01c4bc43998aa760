"""Values that vLLM's params have and Penstock's do not: taken where they change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from penstock.errors import InvalidRequest
from tests.llm import tiny

HARMLESS: dict[str, Any] = {
    "spaces_between_special_tokens": False,
    "skip_clone": True,
    "skip_reading_prefix_cache": True,
    "flat_logprobs": False,
    "extra_args": None,
    "stream_interval": 1,
    "logprob_token_ids": None,
    "repetition_detection": None,
    "routed_experts_prompt_start": 0,
    "trace_decode_token_ids": None,
    "use_beam_search": False,
    "early_stopping": False,
    "length_penalty": 1.0,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_nothing_is_taken(name: str) -> None:
    params = SamplingParams(temperature=0.5, **{name: HARMLESS[name]})
    setattr(params, name, HARMLESS[name])
    assert params == SamplingParams(temperature=0.5)
    assert params.clone(n=2).n == 2


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("flat_logprobs", True, "a dict per position"),
        ("extra_args", {"a": 1}, "no plugins"),
        ("use_beam_search", True, "LLM.beam_search"),
        ("repetition_detection", {"min_count": 3}, "repetition_penalty"),
    ],
)
def test_what_would_change_an_answer_is_refused(name: str, value: Any, instead: str) -> None:
    for attempt in (lambda: SamplingParams(**{name: value}), lambda: setattr(SamplingParams(), name, value)):
        with pytest.raises(InvalidRequest, match=f"{name}=.* is not supported: .*{instead}"):
            attempt()


def test_a_misspelt_name_is_an_error_still() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_structures_and_beams_take_them_too() -> None:
    wanted = StructuredOutputsParams(choice=["a"])
    no_ops: dict[str, Any] = {
        "whitespace_pattern": None,
        "disable_additional_properties": False,
        "disable_fallback": True,
    }
    assert StructuredOutputsParams(choice=["a"], **no_ops) == wanted
    with pytest.raises(InvalidRequest, match="additionalProperties=false"):
        StructuredOutputsParams(json={}, disable_additional_properties=True)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="disable_any_whitespace"):
        StructuredOutputsParams(json={}, whitespace_pattern=" ")  # type: ignore[call-arg]
    beams = BeamSearchParams(beam_width=2, max_tokens=3, include_stop_str_in_output=True)  # type: ignore[call-arg]
    assert beams == BeamSearchParams(beam_width=2, max_tokens=3)


def test_none_of_them_crosses_to_an_engine() -> None:
    params = SamplingParams(n=3, spaces_between_special_tokens=True)  # type: ignore[call-arg]
    sent = msgspec.msgpack.encode(params)
    assert b"spaces" not in sent
    assert msgspec.msgpack.decode(sent, type=SamplingParams) == params


def test_an_answer_ends_where_the_context_does(tmp_path: Path) -> None:
    tiny.write_config(tmp_path, vocab_size=256, max_position_embeddings=64)
    with LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, threads=1, progress=False) as llm:
        [output] = llm.generate([[2, 3, 4]], SamplingParams(max_tokens=10_000, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 61 and output.outputs[0].finish_reason == "length"
        with pytest.raises(InvalidRequest, match="max_tokens to at most 61"):
            llm.beam_search([[2, 3, 4]], BeamSearchParams(beam_width=2, max_tokens=62))


def test_the_package_tells_its_version() -> None:
    import penstock
    from penstock.host.version import VERSION

    assert penstock.__version__ == VERSION
