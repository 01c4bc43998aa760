"""Which path is taken, by choice and by what the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from penstock import ops
from penstock.errors import InvalidConfig
from penstock.ops import cpu
from penstock.ops.cpu.runtime.library import KERNELS, Kernel
from penstock.ops.cpu.runtime.threads import available_cores
from penstock.ops.matmul.epilogue import Epilogue
from tests.ops.check import same_bits
from tests.ops.examples import normal

HIDE_LIBRARY = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name.endswith("._kernels") else find(name, *args)
"""
SHOW = """
import torch
from penstock import ops
y = ops.linear(torch.ones(2, 3), ops.pack_panels(torch.ones(5, 3)), 5)
print(ops.cpu.path(), ops.cpu.num_threads(), int(y.sum()))
"""


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, timeout=120, cwd="/"
    )


def test_the_compiled_library_is_there() -> None:
    assert "generic" in cpu.paths() and cpu.path() in cpu.paths()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "generic")) for name in cpu.paths()]
)
def test_the_environment_chooses(name: str) -> None:
    answer = _python(SHOW, PENSTOCK_CPU=name, PENSTOCK_THREADS="3")
    assert answer.stdout.split() == [name, "3", "30"], answer.stderr


def test_the_best_path_and_all_cores_are_the_default() -> None:
    answer = _python(SHOW)
    assert answer.stdout.split() == [cpu.paths()[-1], str(available_cores()), "30"], answer.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PENSTOCK_CPU", "sse9"),
        ("PENSTOCK_THREADS", "0"),
        pytest.param("PENSTOCK_THREADS", "many", marks=pytest.mark.slow),
    ],
)
def test_an_impossible_choice_is_named(name: str, value: str) -> None:
    answer = _python(SHOW, **{name: value})
    assert answer.returncode == 1
    assert answer.stderr.splitlines()[-1].startswith(f"penstock.errors.InvalidConfig: {name}={value!r}")


def test_without_the_library_the_references_run() -> None:
    answer = _python(HIDE_LIBRARY + SHOW)
    assert answer.stdout.split() == ["reference", "1", "30"], answer.stderr
    answer = _python(HIDE_LIBRARY + SHOW, PENSTOCK_CPU="generic")
    assert "the compiled kernels are missing" in answer.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("letters", "place", "bound", "real"),
    [
        ("nnpnnnfp", 1, "n", "p"),
        ("pnpnnnnp", 7, "n", "f"),
        ("pnpnnnf", 8, "nothing", "p"),
        ("pnpnnnfpi", 9, "i", "nothing"),
    ],
)
def test_a_wrong_letter_is_refused_by_name(letters: str, place: int, bound: str, real: str, path: str) -> None:
    """The C++ functions say what they take: a binding that says something else never reaches a call."""
    bound_before = list(KERNELS)
    with pytest.raises(
        TypeError, match=rf"kernel add, argument {place}: the binding says {bound}, the C\+\+ .* {real};"
    ):
        Kernel("add", letters)
    with pytest.raises(RuntimeError, match=f"older than this code.*penstock_subtract_{path}"):
        Kernel("subtract", "pp")
    assert bound_before == KERNELS and "add" in {kernel.name for kernel in KERNELS}


def test_the_number_of_threads_is_bounded(threads: None) -> None:
    assert cpu.set_num_threads(5) == 5 == cpu.num_threads()
    for count in (0, 257):
        with pytest.raises(InvalidConfig, match=f"num_threads={count}"):
            cpu.set_num_threads(count)


def test_calls_from_many_threads_at_once(threads: None) -> None:
    """One caller has the pool, the others compute alone: nobody gets other bits, nobody waits for ever."""
    cpu.set_num_threads(4)
    panels = ops.pack_panels(normal(1, 400, 200))
    inputs = [normal(seed, 30, 200) for seed in range(16)]
    wanted = [ops.linear(x, panels, 400) for x in inputs]
    with ThreadPoolExecutor(6) as callers:
        for _ in range(5):
            results = list(callers.map(lambda x: ops.linear(x, panels, 400), inputs))
            assert all(same_bits(a, b) for a, b in zip(results, wanted))


def test_resizing_between_calls(threads: None) -> None:
    panels, x = ops.pack_panels(normal(1, 400, 200)), normal(2, 30, 200)
    wanted = ops.linear(x, panels, 400)
    for count in [1, 6, 2, 8, 1, 3] * 5:
        cpu.set_num_threads(count)
        assert same_bits(ops.linear(x, panels, 400), wanted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_alone() -> None:
    answer = _python("""
import os, torch
from penstock import ops
ops.cpu.set_num_threads(4)
panels, x = ops.pack_panels(torch.randn(400, 200)), torch.randn(30, 200)
wanted = ops.linear(x, panels, 400)
child = os.fork()
if child == 0:
    alone = torch.equal(ops.linear(x, panels, 400), wanted) and ops.cpu.num_threads() == 1
    again = ops.cpu.set_num_threads(2) == 2 and torch.equal(ops.linear(x, panels, 400), wanted)
    os._exit(0 if alone and again else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert answer.stdout.strip() == "0", answer.stderr


def test_shapes_that_do_not_fit_are_refused() -> None:
    panels = ops.pack_panels(torch.ones(5, 3))
    with pytest.raises(ValueError, match="panels"):
        ops.linear(torch.ones(1, 4), panels, 5)
    with pytest.raises(ValueError, match="num_out=17"):
        ops.linear(torch.ones(1, 3), panels, 17)
    with pytest.raises(ValueError, match="bias"):
        ops.linear(torch.ones(1, 3), panels, 5, Epilogue(torch.ones(4)))
    with pytest.raises(ValueError, match="weight"):
        ops.rms_norm(torch.ones(1, 4), torch.ones(5), 1e-6)
    with pytest.raises(ValueError, match="kind='swoosh'"):
        ops.activation(torch.ones(1, 4), "swoosh")
