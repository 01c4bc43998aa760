import sys

import torch
from vllm import LLM, SamplingParams


class KeepOnly:
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        kept = logits[self.token].item()
        logits[:] = float("-inf")
        logits[self.token] = kept
        return logits


def no_repeats(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[prompt_ids + output_ids] = -float("inf")
    return logits


llm = LLM(model=sys.argv[1])
prompts = ["the cat", "the dog", "one two"]
outputs = llm.generate(
    prompts,
    [
        SamplingParams(temperature=0.0, max_tokens=5, logits_processors=[KeepOnly(67)]),
        SamplingParams(temperature=0.0, max_tokens=5),
        SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True, logits_processors=[no_repeats]),
    ],
    use_tqdm=False,
)
assert outputs[0].outputs[0].token_ids == [67] * 5
assert outputs[1].outputs[0].token_ids != [67] * 5
ids = outputs[2].outputs[0].token_ids
assert len(set(ids)) == len(ids) == 20 and not set(ids) & set(outputs[2].prompt_token_ids)
