"""The process that encodes for an LLM: it ends with it, is started again, and forks keep apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.errors import InvalidModel
from penstock.sandbox.process import Sandbox
from penstock.sandbox.program import SandboxedProgram, load_sandboxed
from penstock.text.tokenizers.tokenizer import Tokenizer
from tests.llm import tiny

TEXT = "the cat sat on the mat"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    tiny.write_tokenizer(tmp_path)
    return load_sandboxed(tmp_path, str(tmp_path))


def zygote(tokenizer: Tokenizer) -> int:
    assert isinstance(tokenizer.program, SandboxedProgram)
    pid = tokenizer.program.sandbox.pid
    assert pid is not None
    return pid


def wait_gone(pid: int) -> None:
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


def test_it_is_as_good_as_the_tokenizer_here(tokenizer: Tokenizer, tmp_path: Path) -> None:
    here = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode(TEXT) == here.encode(TEXT) and tokenizer.spellings() == here.spellings()
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT and tokenizer.vocab_size == here.vocab_size
    messages = [{"role": "user", "content": TEXT}]
    assert tokenizer.apply_chat_template(messages) == here.apply_chat_template(messages)
    tokenizer.rest()


def test_it_rests_and_is_started_again(tokenizer: Tokenizer) -> None:
    ids, first = tokenizer.encode(TEXT), zygote(tokenizer)
    tokenizer.rest()
    wait_gone(first)
    assert tokenizer.encode(TEXT) == ids and zygote(tokenizer) != first
    tokenizer.rest()


def test_it_is_closed_while_it_loads(tmp_path: Path) -> None:
    """Whoever closes it does not wait for the reply that the loading thread waits for."""
    tiny.write_tokenizer(tmp_path)
    sandbox, errors = Sandbox(), []
    pid = sandbox.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    def load() -> None:
        with pytest.raises(InvalidModel) as caught:
            sandbox.load(tmp_path)
        errors.append(caught.value)

    loading = threading.Thread(target=load)
    loading.start()
    while sandbox._lock.acquire(blocking=False):  # until the thread holds it
        sandbox._lock.release()
    sandbox.close()
    loading.join(20)
    assert errors and not Path(f"/proc/{pid}").exists()


def test_it_goes_with_its_owner(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    made = load_sandboxed(tmp_path, "x")
    pid = zygote(made)
    del made
    wait_gone(pid)


def test_it_goes_with_a_process_that_is_killed(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    script = (
        "import sys, time; from penstock.sandbox.program import load_sandboxed; "
        f"t = load_sandboxed({str(tmp_path)!r}, 'x'); t.encode('a'); print(t.program.sandbox.pid, flush=True); "
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate()
    wait_gone(pid)


def test_it_outlives_the_thread_that_made_it(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    made: list[Tokenizer] = []
    thread = threading.Thread(target=lambda: made.append(load_sandboxed(tmp_path, "x")))
    thread.start()
    thread.join()
    pid = zygote(made[0])
    time.sleep(0.2)
    assert made[0].encode(TEXT) and zygote(made[0]) == pid
    made[0].rest()


def test_threads_share_it(tokenizer: Tokenizer) -> None:
    expected = [tokenizer.encode(f"{TEXT} {number}") for number in range(8)]
    found: dict[int, list[int]] = {}

    def encode(number: int) -> None:
        for _ in range(20):
            found[number] = tokenizer.encode(f"{TEXT} {number}")
            assert found[number] == expected[number]

    threads = [threading.Thread(target=encode, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(8)] == expected
    tokenizer.rest()


def test_a_forked_process_has_its_own(tokenizer: Tokenizer) -> None:
    """Breaks where both write into one socket."""
    ids, pid = tokenizer.encode(TEXT), zygote(tokenizer)
    child = os.fork()
    if child == 0:
        good = all(tokenizer.encode(TEXT) == ids for _ in range(20)) and zygote(tokenizer) != pid
        tokenizer.rest()
        os._exit(0 if good else 1)
    same = [tokenizer.encode(TEXT) == ids for _ in range(20)]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(same) and zygote(tokenizer) == pid and tokenizer.encode(TEXT) == ids
    tokenizer.rest()
