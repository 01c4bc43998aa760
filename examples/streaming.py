"""Two answers that stream at the same time, one of them broken off."""

from __future__ import annotations

import argparse
import asyncio

from penstock import AsyncLLM, SamplingParams


async def tell(llm: AsyncLLM, name: str, prompt: str, params: SamplingParams, most: int | None = None) -> None:
    num_tokens, text = 0, ""
    async for delta in llm.generate(prompt, params):
        text += delta.text
        num_tokens += len(delta.token_ids)
        print(f"{name}: {delta.text!r}")
        if most is not None and num_tokens >= most:
            break  # the engine forgets the request
    print(f"{name} in full: {text!r}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()

    with AsyncLLM(arguments.model) as llm:
        params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
        await asyncio.gather(
            tell(llm, "story", "Once upon a time", params), tell(llm, "list", "The largest planets are", params, most=4)
        )


if __name__ == "__main__":
    asyncio.run(main())
