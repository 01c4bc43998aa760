"""The hook in .githooks/commit-msg takes good messages and refuses bad ones with what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HOOK = Path(__file__).parent.parent / ".githooks" / "commit-msg"
WHY = "\n\nTwo requests held the same block for a step longer than they needed it.\n"


def check(message: str, folder: Path) -> tuple[int, str]:
    path = folder / "COMMIT_EDITMSG"
    path.write_text(message)
    done = subprocess.run([sys.executable, HOOK, path], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "message",
    [
        "cache: free blocks of a branch at once" + WHY,
        "server, text: embed an empty list" + WHY,
        "ops/cpu: pass strides as integers\n# Please enter the message.\n" + WHY + "# On branch main\n",
        "Merge branch 'main'",
        'Revert "cache: free blocks"\n\nThis reverts commit 1.',
        "fixup! cache: free blocks of a branch at once",
    ],
)
def test_good_messages_pass(message: str, tmp_path: Path) -> None:
    assert check(message, tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "module: verb"),
        ("free blocks of a branch at once" + WHY, "module: verb"),
        ("cache: Free blocks of a branch at once" + WHY, "module: verb"),
        ("cache: freed blocks of a branch at once" + WHY, "not imperative"),
        ("cache: frees blocks of a branch at once" + WHY, "not imperative"),
        ("cache: freeing blocks of a branch" + WHY, "not imperative"),
        ("cache: free blocks of a branch." + WHY, "full stop"),
        ("cache: free " + "very " * 13 + "old blocks" + WHY, "87 characters; at most 72"),
        ("cache: free blocks\nof a branch", "second line must be blank"),
        ("cache: free blocks of a branch", "no body"),
        ("cache: free blocks of a branch\n\n# Please enter the message.\n", "no body"),
    ],
)
def test_bad_messages_are_refused(message: str, said: str, tmp_path: Path) -> None:
    code, printed = check(message, tmp_path)
    assert code == 1 and said in printed


def test_hooks_can_be_run() -> None:
    assert all(path.stat().st_mode & 0o111 for path in HOOK.parent.iterdir())
