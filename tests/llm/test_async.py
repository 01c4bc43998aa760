"""AsyncLLM: many tasks, one engine thread."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, AsyncLLM, BeamSearchParams, PenstockError, SamplingParams
from penstock.runner.step import Step
from penstock.types import StreamDelta
from tests.llm import tiny

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def serve(model: str, body: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
    """Run `body` on an AsyncLLM of its own; a test that hangs fails."""
    options = {"skip_tokenizer_init": True, "threads": 1, "kv_cache_tokens": 2048, **options}

    async def main() -> Any:
        with AsyncLLM(model, load_format="dummy", **options) as llm:
            found = await asyncio.wait_for(body(llm), 60)
            await idle(llm)
            return found

    return asyncio.run(main())


async def idle(llm: AsyncLLM) -> None:
    """Everything is given back, soon: the thread may be a step behind its last delta."""
    for _ in range(1000):
        stats = llm.stats()
        busy = [name for name in ("num_running", "num_waiting", "num_used_blocks") if stats[name]]
        if not busy and not llm._thread._streams and not llm._service.collectors:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still busy: {stats}")


async def collect(stream: AsyncIterator[StreamDelta]) -> tuple[str, list[int], str | None]:
    text, reason = "", None
    tokens: list[int] = []
    async for delta in stream:
        text, tokens, reason = text + delta.text, [*tokens, *delta.token_ids], delta.finish_reason
    return text, tokens, reason


def test_twenty_streams_equal_the_offline_answers(text_folder: str, text_llm: LLM) -> None:
    prompts: list[Any] = [f"the answer is {i}" if i % 2 else [i, i + 1, i + 2] for i in range(20)]
    params = [
        SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=5 + i, stop="e" if i % 4 == 1 else None)
        for i in range(20)
    ]
    offline = [output.outputs[0] for output in text_llm.generate(prompts, params, use_tqdm=False)]

    async def body(llm: AsyncLLM) -> Any:
        return await asyncio.gather(*(collect(llm.generate(prompt, one)) for prompt, one in zip(prompts, params)))

    for options in (dict(), dict(max_num_seqs=3, kv_cache_tokens=128, max_model_len=64, block_size=8)):
        found = serve(text_folder, body, skip_tokenizer_init=False, **options)
        assert found == [(one.text, one.token_ids, one.finish_reason) for one in offline]


def test_siblings_chat_and_defaults(text_folder: str, text_llm: LLM) -> None:
    params = SamplingParams(seed=3, n=3, max_tokens=9)
    ask = [{"role": "user", "content": "the cat"}]
    siblings = text_llm.generate("the", params, use_tqdm=False)[0].outputs
    answer = text_llm.chat(ask, LONG, use_tqdm=False)[0].outputs[0]

    async def body(llm: AsyncLLM) -> None:
        tokens: dict[int, list[int]] = {}
        async for delta in llm.generate("the", params):
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
        assert [tokens[index] for index in range(3)] == [one.token_ids for one in siblings]
        assert await collect(llm.chat(ask, LONG)) == (answer.text, answer.token_ids, "length")
        most = llm.default_sampling_params().max_tokens
        assert most is not None and len((await collect(llm.generate([1, 2])))[1]) <= most
        assert llm.tokenizer is not None

    serve(text_folder, body, skip_tokenizer_init=False)


def test_leaving_early_and_being_cancelled(config_folder: str) -> None:
    async def body(llm: AsyncLLM) -> None:
        async for _ in llm.generate([1] * 20, LONG):
            break
        await idle(llm)
        assert llm.stats()["num_aborted"] == 1
        async with aclosing(llm.generate([1] * 20, LONG)) as stream:
            await anext(stream)
            assert llm.stats()["num_running"] == 1
        await idle(llm)
        assert llm.stats()["num_aborted"] == 2
        neighbour = asyncio.create_task(collect(llm.generate([5, 6], LONG)))
        tasks = [asyncio.create_task(collect(llm.generate([i] * 20, LONG))) for i in range(8)]
        await asyncio.sleep(0)
        tasks[0].cancel()  # before the engine has seen it
        while llm.stats()["num_output_tokens"] < 30:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(collect(llm.generate([1] * 20, LONG)), 0.005)
        assert len((await neighbour)[1]) == 100
        await idle(llm)
        assert llm.stats()["num_aborted"] >= 2 + 7, "none of them ran to its end"

    serve(config_folder, body)


def test_a_bad_request_gets_its_error_and_ends_no_other(config_folder: str) -> None:
    async def body(llm: AsyncLLM) -> None:
        neighbour = asyncio.create_task(collect(llm.generate([5, 6], LONG)))
        bad: list[tuple[Any, Any, str]] = [
            ([], None, "the prompt is empty"),
            ([300], None, "out of range"),
            ("text", None, "needs a tokenizer"),
            (object(), None, "a prompt of type object"),
            ([1], SamplingParams(min_tokens=500, max_tokens=500), "min_tokens"),
            ([1], SamplingParams(allowed_token_ids=[999]), "allowed_token_ids"),
            ([1] * 200, None, "200 tokens"),
            ([1], BeamSearchParams(beam_width=2, max_tokens=2), "cannot be streamed"),
            ([1], SamplingParams(n=1, best_of=2), "cannot be streamed"),
            ([1], "params", "cannot be streamed"),
        ]
        for prompt, params, said in bad:
            with pytest.raises(PenstockError, match=said):
                await collect(llm.generate(prompt, params))
        with pytest.raises(PenstockError, match="priority='first'"):
            await collect(llm.generate([1], priority="first"))  # type: ignore[arg-type]
        with pytest.raises(PenstockError, match="needs a tokenizer"):
            await collect(llm.chat([{"role": "user", "content": "x"}]))
        assert len((await neighbour)[1]) == 100

    serve(config_folder, body)


def test_a_request_that_fails_ends_alone(config_folder: str) -> None:
    async def body(llm: AsyncLLM) -> None:
        def refuse(step: Step) -> None:
            if 13 in step.ids.tolist():
                raise ArithmeticError("poison")

        harmless = LONG.clone(allowed_token_ids=[1, 2, 3])
        with tiny.before_forward(llm._service, refuse):
            tasks = [asyncio.create_task(collect(llm.generate(prompt, harmless))) for prompt in ([1, 2], [13], [3])]
            with pytest.raises(PenstockError, match="the model failed on this request: ArithmeticError: poison"):
                await tasks[1]
            assert [len((await tasks[i])[1]) for i in (0, 2)] == [100, 100]

    serve(config_folder, body)


def test_the_engine_itself_fails(config_folder: str) -> None:
    """Every stream hears of it, those too that come later; nothing hangs."""

    async def main() -> None:
        llm = AsyncLLM(config_folder, load_format="dummy", skip_tokenizer_init=True, threads=1)
        tasks = [asyncio.create_task(collect(llm.generate([i], LONG))) for i in range(4)]
        while not llm.stats()["num_output_tokens"]:
            await asyncio.sleep(0.001)

        def broken() -> Any:
            raise RuntimeError("the books are wrong")

        llm._service.step = broken  # type: ignore[method-assign]
        for task in tasks:
            with pytest.raises(PenstockError, match="the engine failed .RuntimeError: the books are wrong") as caught:
                await asyncio.wait_for(task, 60)
            assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(PenstockError, match="the books are wrong"):
            await collect(llm.generate([1]))
        llm.close()

    asyncio.run(main())


def test_close_while_streaming_and_use_after_close(config_folder: str) -> None:
    async def main() -> None:
        llm = AsyncLLM(config_folder, load_format="dummy", skip_tokenizer_init=True, threads=1)
        tasks = [asyncio.create_task(collect(llm.generate([i], LONG))) for i in range(4)]
        while not llm.stats()["num_output_tokens"]:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(collect(llm.generate([9], LONG)))
        await asyncio.sleep(0)
        llm.close()
        for task in [*tasks, late]:
            with pytest.raises(PenstockError, match="this AsyncLLM is closed"):
                await asyncio.wait_for(task, 60)
        with pytest.raises(PenstockError, match="this AsyncLLM is closed: make a new one"):
            await collect(llm.generate([1]))
        llm.close()
        assert llm.stats()["num_output_tokens"] > 0
        assert "penstock-engine" not in {thread.name for thread in threading.enumerate()}

    asyncio.run(main())


def test_an_event_loop_that_ends_first(config_folder: str) -> None:
    """Streams whose loop is gone are given up; the next loop finds the engine well."""
    llm = AsyncLLM(config_folder, load_format="dummy", skip_tokenizer_init=True, threads=1)
    streams = []

    async def begin() -> None:
        streams.append(llm.generate([1], LONG))
        await anext(streams[0])

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()

    async def after() -> None:
        assert len((await asyncio.wait_for(collect(llm.generate([2], LONG)), 60))[1]) == 100
        await idle(llm)

    asyncio.run(after())
    streams.clear()
    llm.close()


def test_requests_from_several_event_loops(config_folder: str) -> None:
    with tiny.dummy(config_folder) as offline:
        expected = [
            output.outputs[0].token_ids for output in offline.generate([[i] for i in range(4)], LONG, use_tqdm=False)
        ]
    found: dict[int, list[int]] = {}
    with AsyncLLM(config_folder, load_format="dummy", skip_tokenizer_init=True, threads=1) as llm:

        def client(i: int) -> None:
            found[i] = asyncio.run(collect(llm.generate([i], LONG)))[1]

        threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[i] for i in range(4)] == expected


def test_two_models_at_once(config_folder: str, tmp_path: Path) -> None:
    """They share the threads of the kernels."""
    folders = [config_folder, tiny.write_config(tmp_path / "other", hidden_size=128, num_hidden_layers=1)]
    prompts = [[i, i + 1] for i in range(6)]
    expected = []
    for folder in folders:
        with tiny.dummy(folder) as offline:
            expected += [output.outputs[0].token_ids for output in offline.generate(prompts, LONG, use_tqdm=False)]

    async def main() -> None:
        llms = [AsyncLLM(folder, load_format="dummy", skip_tokenizer_init=True, threads=2) for folder in folders]
        found = await asyncio.gather(*(collect(llm.generate(prompt, LONG)) for llm in llms for prompt in prompts))
        assert [tokens for _, tokens, _ in found] == expected
        for llm in llms:
            llm.close()

    asyncio.run(main())


def test_collection_ends_the_thread(config_folder: str) -> None:
    llm = AsyncLLM(config_folder, load_format="dummy", skip_tokenizer_init=True, threads=1)
    thread, blocks = llm._thread, weakref.ref(tiny.runner(llm._service).memory.blocks)
    asyncio.run(collect(llm.generate([1, 2], LONG)))
    del llm
    gc.collect()
    thread.join(60)
    assert not thread.is_alive() and blocks() is None


def test_exit_in_the_middle_of_a_stream(config_folder: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import asyncio, sys
from penstock import AsyncLLM, SamplingParams

async def main():
    global llm, stream
    llm = AsyncLLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, threads=2)
    stream = llm.generate([1, 2], SamplingParams(max_tokens=100, ignore_eos=True))
    await anext(stream)
    print("streaming")

asyncio.new_event_loop().run_until_complete(main())
""")
    done = subprocess.run([sys.executable, str(script), config_folder], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "streaming\n"), done.stderr
    assert "Traceback" not in done.stderr
