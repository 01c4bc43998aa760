"""Many prompts at once, several answers to each, and how sure the model was of every token."""

from __future__ import annotations

import argparse
import math

from penstock import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Two plus two equals", "Once upon a time"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=12)
    arguments = parser.parse_args()

    with LLM(arguments.model) as llm:
        params = SamplingParams(n=2, temperature=0.8, top_p=0.95, seed=7, max_tokens=arguments.max_tokens, logprobs=2)
        for output in llm.generate(PROMPTS, params):
            print(output.prompt)
            for answer in output.outputs:
                print(f"  {answer.index}: {answer.text!r} ({answer.finish_reason}, {answer.cumulative_logprob:.2f})")
            first = output.outputs[0].logprobs[0]
            guesses = ", ".join(f"{one.decoded_token!r} {math.exp(one.logprob):.0%}" for one in first.values())
            print(f"  the first token might have been {guesses}")
        stats = llm.stats()
        print("{num_output_tokens} tokens in {num_steps} steps, {max_batch_size} rows at most".format(**stats))


if __name__ == "__main__":
    main()
