"""Other people's clients against a running server, each in a virtual environment of its own.

    python -m tests.clients.run [NAME …]

NAME.py beside this file is what one client does, run with -I because it may have its package's name. It is given the
server's address and the model, and fails by an exception.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from tests.docs.examples import find_client_example
from tests.server.running import RunningServer

HERE = Path(__file__).parent
HOMES = HERE.parent.parent / ".venv-clients"
MODEL = "smollm2"
PACKAGES = {
    "openai": ["openai"],
    "anthropic": ["anthropic"],
    "ollama": ["ollama"],
    "huggingface_hub": ["huggingface_hub"],
    "litellm": ["litellm", "mcp"],
    "langchain": ["langchain-openai", "langchain-ollama"],
    "llama_index": ["llama-index-core", "llama-index-llms-openai-like"],
    "instructor": ["instructor"],
    "pydantic_ai": ["pydantic-ai-slim[openai,anthropic]"],
    "llm": ["llm"],
}
TIMEOUT_S = 300
QUIET = {"NO_PROXY": "127.0.0.1,localhost", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # nothing leaves this machine


def python_of(name: str) -> Path:
    """Its interpreter; the packages are installed the first time."""
    home = HOMES / name
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        print(f"{name}: installing {' '.join(PACKAGES[name])}", flush=True)
        venv.create(home, with_pip=True, clear=True)
        install: list[str | Path] = [
            python,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "-qq",
            *PACKAGES[name],
        ]
        subprocess.run(install, check=True)
        (home / "installed").touch()
    return python


def passes(name: str, url: str) -> bool:
    """Run the client, and its example in the manual if it has one."""
    example = find_client_example(name, url)
    return run(name, HERE / f"{name}.py", url, MODEL) and (example is None or run(f"{name}'s example", "-c", example))


def run(name: str, *arguments: str | Path) -> bool:
    try:
        command: list[str | Path] = [python_of(name.removesuffix("'s example")), "-I", *arguments]
        env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}  # it is no hub
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**env, **QUIET})
    except (subprocess.SubprocessError, OSError) as error:
        print(f"{name}: FAILED: {error}", flush=True)
        return False
    print(f"{name}: {'passed' if ran.returncode == 0 else 'FAILED'}", flush=True)
    if ran.returncode:
        print(ran.stdout + ran.stderr)
    return ran.returncode == 0


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in PACKAGES]
    if unknown:
        print(f"error: no client {unknown[0]!r}: there are {', '.join(PACKAGES)}", file=sys.stderr)
        return 2
    with RunningServer(MODEL, "--max-model-len", "2048") as server:
        passed = [passes(name, server.url) for name in names or PACKAGES]
    print(f"{sum(passed)} of {len(passed)} clients pass")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
