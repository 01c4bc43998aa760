import sys

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import BeamSearchParams

llm = LLM(sys.argv[1], enable_prefix_caching=True, block_size=16, enable_sleep_mode=True)
shared = "one two three four five six seven eight nine ten the cat sat on the mat and the dog ran after the ball "
params = SamplingParams(temperature=0.0, max_tokens=5)
prompts = [shared + end for end in ("one", "two", "what")]
plain = [output.outputs[0].text for output in LLM(sys.argv[1], enable_prefix_caching=False).generate(prompts, params)]
llm.generate(prompts[0], params)
outputs = llm.generate(prompts, params)
assert [output.outputs[0].text for output in outputs] == plain
assert all(output.num_cached_tokens >= 16 for output in outputs)

beams = llm.beam_search(
    [TokensPrompt(prompt_token_ids=[5, 6]), {"prompt": "the cat"}],
    BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True),
)
assert [len(beam.sequences) for beam in beams] == [3, 3]
assert beams[0].sequences[0].cum_logprob >= beams[0].sequences[1].cum_logprob

assert llm.reset_prefix_cache()
llm.sleep(level=1)
llm.wake_up()
assert [output.outputs[0].text for output in llm.generate(prompts, params)] == plain
