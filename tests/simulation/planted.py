"""The test of the tests: plant a bug in a copy of the core and see which suite catches it.

`python -m tests.simulation.planted` prints the table; with `--all` each suite is run on every bug, not only until one
catches it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.simulation.bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
CORE = ["__init__.py", "types", "config", "errors.py", "cache", "engine"]
SUITES = ("cache", "engine", "simulation")
LEFT_OUT = (
    "test_config.py",
    "test_types.py",
    "test_imports.py",
    "test_device.py",
    "test_planted.py",
    "test_soak.py",
    "test_latency.py",
)
SLOW = ("test_pool.py", "test_tree.py", "test_machine.py", "test_simulation.py")  # these come last, in this order
TIMEOUT_S = 120
# An installed package may come before PYTHONPATH: -S leaves the hooks of site-packages out.
PYTEST = (
    "import sys, penstock, pytest; assert penstock.__file__.startswith({root!r}), penstock.__file__; "
    "sys.exit(pytest.main(sys.argv[1:]))"
)


def _passing(folder: str, names: list[str]) -> list[str]:
    """Files that another test worker is just writing under a name of its own."""
    return [name for name in names if "." in name and not name.endswith((".py", ".pyc"))]


def copy_core(target: Path, suites: Sequence[str] = SUITES) -> None:
    """Compiled files come along with their sources' times, so that only what is patched is compiled again."""
    (target / "penstock").mkdir(parents=True)
    for name in CORE:
        source = ROOT / "penstock" / name
        if source.is_dir():
            shutil.copytree(source, target / "penstock" / name, ignore=_passing)
        else:
            shutil.copy2(source, target / "penstock" / name)
    for name in suites:
        shutil.copytree(ROOT / "tests" / name, target / "tests" / name, ignore=_passing)
    (target / "pytest.ini").write_text("[pytest]\npythonpath = .\n")


def copy_drafters(target: Path) -> None:
    """Everything but the drafters and their tests is a link."""
    for folder, copied in (("penstock", ("draft", "__init__.py")), ("tests", ("draft",))):
        (target / folder).mkdir(parents=True)
        for source in (ROOT / folder).iterdir():
            place = target / folder / source.name
            if source.name not in copied:
                place.symlink_to(source)
            elif source.is_dir():
                shutil.copytree(source, place, ignore=_passing)
            else:
                shutil.copy2(source, place)
    (target / "pytest.ini").write_text("[pytest]\npythonpath = .\n")


def plant(bug: Bug, target: Path) -> None:
    """Apply every edit; one whose old text is not there exactly once is out of date."""
    for edit in bug.edits:
        path = target / "penstock" / edit.path
        source = path.read_text()
        if source.count(edit.old) != 1 or edit.old == edit.new:
            raise ValueError(
                f"{bug.name!r}: the text to replace stands {source.count(edit.old)} times in {edit.path}, "
                f"not once: {edit.old!r}"
            )
        patched = source.replace(edit.old, edit.new)
        compile(patched, edit.path, "exec")
        path.write_text(patched)


def files_of(suites: Sequence[str]) -> list[str]:
    """The suites' test files, the quick ones first."""
    files = [path for suite in suites for path in sorted((ROOT / "tests" / suite).glob("test_*.py"))]
    files.sort(key=lambda path: SLOW.index(path.name) + 1 if path.name in SLOW else 0)
    return [str(path.relative_to(ROOT)) for path in files if path.name not in LEFT_OUT]


def run_suites(target: Path, suites: Sequence[str]) -> str:
    """The first test that fails, or nothing."""
    command = [
        sys.executable,
        "-S",
        "-c",
        PYTEST.format(root=str(target)),
        "-x",
        "-q",
        "--tb=line",
        "--assert=plain",  # nobody reads the messages, and rewriting costs a third of a trial
        "--noconftest",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        *files_of(suites),
    ]
    paths = [str(target), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment.update(PENSTOCK_EFFORT="quick", PYTHONPATH=os.pathsep.join(paths), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    try:
        done = subprocess.run(command, cwd=target, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or failed is None:
        raise RuntimeError(f"the suites did not run:\n{done.stdout}\n{done.stderr}")
    return failed.group(1)


def trial(bug: Bug | None, folder: Path, suites: Sequence[str] = SUITES) -> str:
    """Plant one bug, or none, and run the suites one after the other: the first test that fails."""
    target = folder / "copy"
    copy_core(target)
    if bug is not None:
        plant(bug, target)
    return run_suites(target, suites)


def trial_of_drafters(bug: Bug, folder: Path) -> str:
    """Plant a bug in the drafters and run their tests: the first that fails."""
    target = folder / "copy"
    copy_drafters(target)
    plant(bug, target)
    return run_suites(target, ("draft",))


def suite_of(test: str) -> str:
    return test.split("/")[1] if test.startswith("tests/") else test or "nobody"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.planted", description=__doc__)
    parser.add_argument("--all", action="store_true", help="run every suite on every bug")
    parser.add_argument("--only", default="", help="bugs whose name contains this")
    options = parser.parse_args(arguments)
    missed = 0
    for bug in [bug for bug in BUGS if options.only in bug.name]:
        caught = []
        for suites in [[suite] for suite in SUITES] if options.all else [list(SUITES)]:
            with tempfile.TemporaryDirectory() as folder:
                caught.append(trial(bug, Path(folder), suites))
        missed += not any(caught)
        print(
            f"{bug.name:64} {' '.join(f'{suite_of(test):11}' for test in caught)} "
            f"{next((test.split('/')[-1] for test in caught if test), '')}",
            flush=True,
        )
    print(f"{missed} missed" if missed else "all caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
