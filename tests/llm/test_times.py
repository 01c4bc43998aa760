"""Where the time of steps goes, as far as the engine itself can tell."""

from __future__ import annotations

from penstock import LLM, SamplingParams


def test_forward_and_sampling_are_parts_of_steps(text_llm: LLM) -> None:
    before = text_llm.stats()
    text_llm.generate(["one", "two"], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    after = text_llm.stats()
    step, forward, sampling = (after[name] - before[name] for name in ("step_s", "forward_s", "sampling_s"))
    assert after["num_steps"] >= before["num_steps"] + 5
    assert forward > 0 and sampling > 0 and forward + sampling < step
