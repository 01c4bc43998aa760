"""close() and collection free everything."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.quant.dense import Dense
from tests.llm import tiny


def traces(llm: LLM) -> list[weakref.ref[Any]]:
    runner = tiny.runner(llm.service)
    tokens = runner.model.embedding.tokens
    assert isinstance(tokens, Dense)
    return [weakref.ref(thing) for thing in (runner, runner.model, runner.memory, runner.memory.blocks, tokens.panels)]


def used(model: str) -> LLM:
    llm = tiny.dummy(model)
    llm.generate([[1, 2, 3], [4]], SamplingParams(n=2, max_tokens=4), use_tqdm=False)
    next(iter(llm.stream([5], SamplingParams(max_tokens=4))))
    return llm


def test_close(config_folder: str) -> None:
    llm = used(config_folder)
    refs = traces(llm)
    assert all(ref() is not None for ref in refs)
    llm.close()
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.parametrize("by", ["deletion", "context", "open stream"])
def test_without_close(config_folder: str, by: str) -> None:
    llm = used(config_folder)
    refs = traces(llm)
    if by == "context":
        with llm:
            pass
    elif by == "open stream":
        stream = llm.stream([1, 2], SamplingParams(max_tokens=50))
        next(stream)
        del stream
    del llm
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_refused_models_leave_nothing(config_folder: str) -> None:
    """A failure after the weights were made."""
    gc.collect()
    before = sum(type(thing).__name__ == "Decoder" for thing in gc.get_objects())
    for _ in range(3):
        with pytest.raises(Exception, match="cannot allocate a KV cache of .* GiB: lower kv_cache_tokens"):
            tiny.dummy(config_folder, kv_cache_tokens=10**13)
    gc.collect()
    assert sum(type(thing).__name__ == "Decoder" for thing in gc.get_objects()) == before


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_models_one_after_the_other_do_not_add_up(tmp_path: Path) -> None:
    """Twenty models of 9 MB each."""
    folder = tiny.write_config(tmp_path / "model", hidden_size=256, intermediate_size=512, vocab_size=4096)

    def turn() -> None:
        llm = tiny.dummy(folder)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
        llm.close()

    for _ in range(4):
        turn()
    gc.collect()
    before = resident_bytes()
    for _ in range(20):
        turn()
    gc.collect()
    assert resident_bytes() - before < 60e6


@pytest.mark.slow
def test_many_requests_leave_nothing(config_folder: str) -> None:
    """The engine's own books do not grow with the number of requests served."""
    with tiny.dummy(config_folder, kv_cache_tokens=128, block_size=8, max_model_len=64) as llm:

        def count() -> int:
            for _ in llm.stream([7] * 20, SamplingParams(max_tokens=3)):
                break
            llm.generate([[i % 250, i % 7, 3] * 5 for i in range(60)], SamplingParams(max_tokens=2), use_tqdm=False)
            gc.collect()
            return len(gc.get_objects())

        counts = [count() for _ in range(4)]
        assert max(counts[1:]) - counts[1] < 200
