"""Libraries of one name, as Triton loads them, do not take each other's place."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from tests.ops import test_triton  # noqa: F401  before Triton is imported

pytest.importorskip("triton")

from triton.runtime import build  # noqa: E402

from penstock.runner.compile.launchers import isolate_launchers  # noqa: E402

NAME, LOADER = "__penstock_test_launcher", "_load_module_from_path"
SOURCE = """#include <Python.h>
static PyObject *which(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"which", which, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "NAME", NULL, -1, methods};
PyMODINIT_FUNC PyInit_NAME(void) { return PyModule_Create(&definition); }
""".replace("NAME", NAME)

pytestmark = pytest.mark.skipif(not hasattr(build, LOADER), reason="this Triton loads libraries otherwise")


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python does it: one module for all, filled with what the last one has."""
    shared = ModuleType(NAME)

    def load(name: str, path: str) -> ModuleType:
        shared.launch = path  # type: ignore[attr-defined]
        time.sleep(0.002)
        return shared

    monkeypatch.setattr(build, LOADER, load)
    isolate_launchers()
    paths = [str(number) for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda path: getattr(build, LOADER)(NAME, path).launch, paths))
    assert found == paths


def test_each_keeps_its_own_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, LOADER, getattr(build, LOADER))
    sources = [SOURCE.replace("NUMBER", str(number)) for number in (1, 2)]
    try:
        first = [build.compile_module_from_src(source, NAME) for source in sources]
    except (subprocess.CalledProcessError, RuntimeError):
        pytest.skip("no C compiler, or none of Python's headers")
    assert [module.which() for module in first] == [1, 2]
    isolate_launchers()
    isolate_launchers()
    again = [build.compile_module_from_src(source, NAME) for source in sources]
    assert [module.which() for module in again] == [1, 2]
