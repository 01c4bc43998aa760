"""The threads under load: callers at once, sizes that change, workers that sleep and wake. Nobody waits for ever."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from penstock import ops
from penstock.ops import cpu
from tests.ops.check import same_bits
from tests.ops.examples import normal

PANELS = ops.pack_panels(normal(1, 200, 96))


def _stress(seed: int) -> int:
    """Calls of many sizes, some after a sleep long enough for the workers to fall asleep: how many went wrong."""
    rng, wrong = random.Random(seed), 0
    for _ in range(60):
        rows = rng.choice((1, 2, 3, 17, 64))
        x = normal(rng.randrange(1000), rows, 96)
        parts = [ops.linear(x[i : i + 1], PANELS, 200) for i in range(rows)]
        wrong += not same_bits(ops.linear(x, PANELS, 200), torch.cat(parts))
        if rng.random() < 0.1:
            time.sleep(rng.random() / 500)
    return wrong


def test_many_callers_while_the_pool_changes_its_size(threads: None) -> None:
    cpu.set_num_threads(3)
    with ThreadPoolExecutor(4) as callers:
        running = [callers.submit(_stress, seed) for seed in range(4)]
        rng = random.Random(9)
        while not all(one.done() for one in running):
            cpu.set_num_threads(rng.choice((1, 2, 3, 5, 8)))
            time.sleep(0.001)
        assert [one.result() for one in running] == [0] * 4


def test_every_item_is_computed_once(threads: None) -> None:
    """With more threads than items, than cores, than either; breaks when a share is left out or taken twice."""
    x = normal(3, 300, 150)
    wanted = x * 3
    for count in (1, 2, 3, 4, 7, 16, 61):
        cpu.set_num_threads(count)
        for rows in (1, 2, 3, 5, 299, 300):
            y = torch.zeros(rows, 150)
            for _ in range(3):
                y = ops.add(y, x[:rows])
            torch.testing.assert_close(y, wanted[:rows])


def test_threads_sleep_when_there_is_nothing_to_do() -> None:
    """Breaks when workers spin on after a call or a replayed list."""
    answer = subprocess.run(
        [
            sys.executable,
            "-c",
            """
import time, torch
from penstock import ops
from penstock.ops.cpu.runtime.arena import Arena
from penstock.ops.cpu.runtime.tape import record
ops.cpu.set_num_threads(4)
panels, x = ops.pack_panels(torch.randn(400, 200)), torch.randn(30, 200)
_, tape = record(lambda: ops.linear(x, panels, 400), Arena())
for _ in range(20):
    tape.replay()
time.sleep(0.1)
before = time.process_time()
time.sleep(1.5)
print(time.process_time() - before)
""",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert float(answer.stdout) < 0.015  # seconds of processor time: 50 ms in 5 s


def test_torch_keeps_to_one_thread_beside_ours() -> None:
    before = torch.get_num_threads()
    with cpu.limit_torch():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
