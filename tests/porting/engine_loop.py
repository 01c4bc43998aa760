import sys

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams

engine = LLMEngine.from_engine_args(EngineArgs(model=sys.argv[1], max_num_seqs=4))
waiting = [
    ("a robot may not", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=7)),
    ("to be or", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=7)),
    ("what is the", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1, max_tokens=7)),
]
num_added, finished = 0, []
while waiting or engine.has_unfinished_requests():
    if waiting:
        prompt, params = waiting.pop(0)
        engine.add_request(str(num_added), prompt, params)
        num_added += 1
    outputs: list[RequestOutput] = engine.step()
    finished += [output for output in outputs if output.finished]
assert sorted(output.request_id for output in finished) == ["0", "1", "2"]
assert sorted(len(output.outputs) for output in finished) == [1, 1, 2]
assert next(output for output in finished if output.request_id == "0").prompt_logprobs[0] is None
engine.reset_prefix_cache()
