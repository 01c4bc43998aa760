"""Libraries of one name, as Triton loads them, do not take each other's place."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.ops import test_triton  # noqa: F401  before Triton is imported

pytest.importorskip("triton")

from triton.runtime import build  # noqa: E402

from penstock.ops.triton.launchers import load_apart  # noqa: E402

NAME = "__penstock_test_launcher"
SOURCE = """#include <Python.h>
static PyObject *which(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"which", which, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "NAME", NULL, -1, methods};
PyMODINIT_FUNC PyInit_NAME(void) { return PyModule_Create(&definition); }
""".replace("NAME", NAME)


def test_each_keeps_its_own_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path)
    sources = [SOURCE.replace("NUMBER", str(number)) for number in (1, 2)]
    try:
        first = [build.compile_module_from_src(source, NAME) for source in sources]
    except subprocess.CalledProcessError:
        pytest.skip("no C compiler, or none of Python's headers")
    assert [module.which() for module in first] == [1, 2]
    load_apart()
    load_apart()
    again = [build.compile_module_from_src(source, NAME) for source in sources]
    assert [module.which() for module in again] == [1, 2]
