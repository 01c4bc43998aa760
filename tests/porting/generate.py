import sys

from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput

llm = LLM(
    model=sys.argv[1],
    trust_remote_code=True,
    tensor_parallel_size=1,
    dtype="float32",
    max_model_len=200,
    gpu_memory_utilization=0.5,
    swap_space=2,
    enforce_eager=True,
    disable_log_stats=False,
)
prompts = ["the cat sat on", "one two three", {"prompt": "what is"}, {"prompt_token_ids": [5, 6, 7]}]
params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=8, logprobs=2, stop=["zzz"])
outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=False, lora_request=None)
assert [output.prompt for output in outputs] == ["the cat sat on", "one two three", "what is", None]
for output in outputs:
    answer = output.outputs[0]
    assert answer.cumulative_logprob < 0 and len(answer.logprobs) == len(answer.token_ids)
    assert output.finished and output.metrics.first_token_time > output.metrics.arrival_time
    print(f"{output.prompt!r} -> {answer.text!r} ({answer.finish_reason})")

several = [SamplingParams(temperature=0.0, max_tokens=4), SamplingParams(n=3, max_tokens=4)]
assert [len(output.outputs) for output in llm.generate(["a", "b"], several, use_tqdm=False)] == [1, 3]
