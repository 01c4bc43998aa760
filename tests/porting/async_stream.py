import asyncio
import sys

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind


async def stream(engine: AsyncLLMEngine, prompt: str, request_id: str) -> str:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        for completion in output.outputs:
            text += completion.text
        if output.finished:
            break
    return text


async def main() -> None:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=sys.argv[1], enforce_eager=True))
    try:
        prompts = ["the cat", "one two", "the cat"]
        texts = await asyncio.gather(*(stream(engine, prompt, f"r{i}") for i, prompt in enumerate(prompts)))
        assert texts[0] == texts[2] and all(texts)
        params = SamplingParams(max_tokens=12, temperature=0.8, seed=42)
        whole = [output async for output in engine.generate("the cat", params, "whole")]
        assert whole[-1].finished and whole[-1].outputs[0].text == texts[0]
        print(texts)
    finally:
        engine.shutdown()


asyncio.run(main())
