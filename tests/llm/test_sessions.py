"""Sessions of an LLM: kept by name, saved with their tokens, and restored in another process's LLM."""

from __future__ import annotations

import random
import stat
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.api.async_llm import AsyncLLM
from penstock.errors import InvalidRequest
from penstock.host.session_records import FOLDER, MAX_RECORDS, SessionRecord, SessionRecords, digest_scope
from tests.same_tokens.roads import tiny_llm, tiny_model

PARAMS = SamplingParams(max_tokens=8, temperature=0.8, seed=3, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("sessions"), "Qwen3ForCausalLM")


def prompt(seed: int, length: int = 70) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 64) for _ in range(length)]


def ask(llm: LLM, tokens: list[int], **changes: Any) -> tuple[list[int], int]:
    (output,) = llm.generate([tokens], PARAMS.clone(**changes), use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


def crowd(llm: LLM, count: int = 12) -> None:
    """Fill the cache several times."""
    for seed in range(100, 100 + count):
        ask(llm, prompt(seed, 100))


@pytest.mark.parametrize("kept", [{"session": "talk"}, {"cache_priority": 7}])
def test_a_prefix_outlives_a_crowd(model: str, kept: dict[str, Any]) -> None:
    with tiny_llm(model, kv_cache_tokens=512) as llm:
        first, _ = ask(llm, prompt(1), **kept)
        ask(llm, prompt(2))
        crowd(llm)
        assert ask(llm, prompt(1)) == (first, 64)
        assert ask(llm, prompt(2))[1] == 0, "nothing kept this one"


def test_a_session_goes_on_in_another_llm(model: str, tmp_path: Path) -> None:
    """All but the last block come from the store, whose digests the record's tokens lead to."""
    options = {"kv_offloading_path": str(tmp_path)}
    with tiny_llm(model) as llm:
        turn = prompt(1)
        answer, _ = ask(llm, turn)
        expected, _ = ask(llm, [*turn, *answer, 5, 6, 7])
    with tiny_llm(model, **options) as llm:
        assert ask(llm, turn, session="talk") == (answer, 0)
        assert llm.sessions.save("talk") == 64
    with tiny_llm(model, **options) as llm:
        assert llm.sessions.restore("talk", session_ttl=60) == 48
        assert llm.stats()["num_restored_tokens"] == 48 and llm.stats()["num_sessions"] == 1
        assert ask(llm, [*turn, *answer, 5, 6, 7]) == (expected, 64)
        assert llm.sessions.erase("talk") == 64 and llm.stats()["num_sessions"] == 0
        with pytest.raises(InvalidRequest, match="no session 'talk' was saved from this model: save it first"):
            llm.sessions.restore("talk")


def test_blocks_that_are_lost_are_computed(model: str, tmp_path: Path) -> None:
    with tiny_llm(model, kv_offloading_path=str(tmp_path)) as llm:
        first, _ = ask(llm, prompt(1), session="talk")
        llm.sessions.save("talk")
    for file in tmp_path.glob("penstock-kv*/*"):
        file.unlink()
    with tiny_llm(model, kv_offloading_path=str(tmp_path)) as llm:
        assert llm.sessions.restore("talk") == 0
        assert ask(llm, prompt(1)) == (first, 64)


def test_a_restore_needs_the_same_salt_and_model(model: str, tmp_path: Path) -> None:
    with tiny_llm(model, kv_offloading_path=str(tmp_path)) as llm:
        llm.generate([{"prompt_token_ids": prompt(1), "cache_salt": "a"}], PARAMS.clone(session="s"), use_tqdm=False)
        llm.sessions.save("s")
        with pytest.raises(InvalidRequest, match="other adapters or another cache_salt"):
            llm.sessions.restore("s")
        assert llm.sessions.restore("s", cache_salt="a") == 48
    assert b"a" not in {one for file in (tmp_path / FOLDER).iterdir() for one in file.read_bytes().split(b'"')}
    other = tiny_model(tmp_path / "other", "LlamaForCausalLM")
    with tiny_llm(other, kv_offloading_path=str(tmp_path)) as llm, pytest.raises(InvalidRequest, match="this model"):
        llm.sessions.restore("s", cache_salt="a")


def test_what_cannot_be_saved(model: str, tmp_path: Path) -> None:
    with tiny_llm(model) as llm:
        for act in (llm.sessions.save, llm.sessions.erase):
            with pytest.raises(InvalidRequest, match="there is no session 'x': finish a request with it first"):
                act("x")
        ask(llm, prompt(1), session="x")
        with pytest.raises(InvalidRequest, match="no store to save a session to: start with --kv-offloading-path"):
            llm.sessions.save("x")


def test_asynchronous_requests_have_sessions_too(model: str) -> None:
    import asyncio

    async def run() -> int:
        with AsyncLLM(model, load_format="dummy", skip_tokenizer_init=True, kv_cache_tokens=512) as llm:
            async for _ in llm.generate(prompt(1), PARAMS.clone(session="s")):
                pass
            return int(llm.stats()["num_sessions"])

    assert asyncio.run(run()) == 1


@pytest.mark.parametrize("is_file", [False, True])
def test_records_are_each_tenants_own_and_bounded(tmp_path: Path, is_file: bool) -> None:
    records = SessionRecords(str(tmp_path) if is_file else None)
    record = SessionRecord((1, 2, 3), digest_scope([("a", 1)], "salt"))
    records.write("alice", "s", record)
    assert records.read("alice", "s") == record and records.read("bob", "s") is None
    for number in range(MAX_RECORDS + 3):
        records.write("bob", f"s{number}", record)
    assert sum(records.read("bob", f"s{number}") is not None for number in range(MAX_RECORDS + 3)) == MAX_RECORDS
    assert records.read("alice", "s") == record, "bob's many records cost bob's"
    assert records.erase("alice", "s") == record and records.erase("alice", "s") is None
    records.forget()
    assert records.read("bob", f"s{MAX_RECORDS}") is None


def test_damaged_records_are_removed(tmp_path: Path) -> None:
    records = SessionRecords(str(tmp_path))
    records.write("", "s", SessionRecord((1, 2), ""))
    (file,) = (tmp_path / FOLDER).iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1], whole[:20] + b"9" + whole[21:]):
        file.write_bytes(damaged)
        with pytest.raises(InvalidRequest, match="session 's': what was saved is damaged, and was removed"):
            records.read("", "s")
        assert records.read("", "s") is None
    file.parent.chmod(0o755)
    with pytest.raises(PermissionError, match="is open to other users"):
        records.write("", "s", SessionRecord((1,), ""))
