"""The `llm` command: a prompt, a system message, a conversation that goes on, a schema, a stream."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, model = sys.argv[1:3]
COMMAND = Path(sys.executable).parent / "llm"
PARIS = "The capital of France is Paris."
MODELS = f"""
- model_id: here
  model_name: {model}
  api_base: "{url}/v1"
  api_key_name: here
  supports_schema: true
  supports_tools: true
"""

with tempfile.TemporaryDirectory() as home:
    Path(home, "extra-openai-models.yaml").write_text(MODELS)
    env = {**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "none"}

    def run(*arguments: str, given: str = "") -> str:
        done = subprocess.run([COMMAND, *arguments], input=given, capture_output=True, text=True, env=env, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    run("keys", "set", "here", "--value", "none")
    assert "here" in run("models")
    greedy = ("-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "40")
    assert run(*greedy, "What is the capital of France?") == PARIS
    assert run(*greedy, "--no-stream", "What is the capital of France?") == PARIS
    assert run(*greedy, "--system", "You are brief.", given="What is the capital of France?")
    assert run("-c", "-o", "temperature", "0", "-o", "max_tokens", "10", "And of Italy?")
    formed = json.loads(run(*greedy, "--schema", "city str", "What is the capital of France?"))
    assert formed["city"], formed
