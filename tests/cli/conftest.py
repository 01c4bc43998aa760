"""A tiny model with random weights and a byte-level tokenizer, and a terminal to sit at."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def write_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    """No end-of-sequence token: an answer goes on until it is stopped."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("chat") / "tiny chat"))


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("plain") / "tiny", template=None))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, and no way out for pip and the hub's client."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("PENSTOCK_DEBUG", raising=False)
    return tmp_path / "home"


ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[=>78]|\][^\x07]*\x07|[^a-zA-Z]*$)")


class Terminal:
    """`penstock` on a pseudo-terminal of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            os.environ.update({"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "NO_COLOR": "1", **environment})
            os.execv(sys.executable, [sys.executable, "-m", "penstock", *arguments])
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.screen, self.raw = "", ""  # without and with what steers the terminal
        self._read = 0
        self._status: int | None = None

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, *texts: str) -> str:
        """Wait until each text has appeared, in order, since the last call; what was printed on the way."""
        start = self._read
        for text in texts:
            deadline = time.monotonic() + 60
            while (found := self.screen.find(text, self._read)) < 0:
                assert time.monotonic() < deadline and self._more(), f"no {text!r} in {self.screen[start:]!r}"
            self._read = found + len(text)
        return self.screen[start : self._read]

    def status(self) -> int:
        """The exit status, once the program has ended by itself."""
        while self._more():
            pass
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def close(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._master)

    def _more(self) -> bool:
        if not select.select([self._master], [], [], 60)[0]:
            return False
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:
            return False
        self.raw += data.decode("utf-8", "replace")
        self.screen = ESCAPES.sub("", self.raw).replace("\r\n", "\n")
        return bool(data)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str, **environment: str) -> Terminal:
        opened.append(Terminal(*arguments, **environment))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()
