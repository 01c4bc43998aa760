"""Answer one question through the model's chat template: python examples/chat.py "Why is the sky blue?" """

from __future__ import annotations

import argparse

from penstock import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()

    conversation = [{"role": "user", "content": arguments.question}]
    with LLM(arguments.model) as llm:
        params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
        output = llm.chat(conversation, params, use_tqdm=False)[0]
        print(output.outputs[0].text)

        conversation += [
            {"role": "assistant", "content": output.outputs[0].text},
            {"role": "user", "content": "And what is it known for?"},
        ]
        output = llm.chat(conversation, params, use_tqdm=False)[0]
        print(output.outputs[0].text)
        print(f"({output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens came from the cache)")


if __name__ == "__main__":
    main()
