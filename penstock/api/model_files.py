"""A model's files, tokenizer and grammars, by the options of an engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from penstock.config import EngineConfig
from penstock.models.files import Checkpoint, open_checkpoint
from penstock.sampling.grammar.compiler import GrammarCompiler
from penstock.sandbox.lexicon import make_lexicon
from penstock.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

Made = TypeVar("Made")


def find_model(name: str, revision: str | None, progress: bool) -> Path:
    """Return the folder or file of that name; download it if it is missing."""
    from penstock.hub import resolve_model

    return resolve_model(name, revision=revision, progress=progress)


def make_grammars(path: Path, config: EngineConfig, tokenizer: Tokenizer | None) -> GrammarCompiler | None:
    """Make the grammar compiler; trials run in the tokenizer's process, or arrive with the request."""
    if config.skip_tokenizer_init:
        return None
    if tokenizer is None:
        return GrammarCompiler(lambda: make_lexicon(_with_source(path, None, config, load_tokenizer)))
    from penstock.sandbox.program import SandboxedProgram

    assert isinstance(tokenizer.program, SandboxedProgram)
    return GrammarCompiler(partial(make_lexicon, tokenizer), tokenizer.program.try_grammar)


def load_in_sandbox(path: Path, checkpoint: Checkpoint | None, config: EngineConfig, template: str | None) -> Tokenizer:
    """Load the tokenizer in a process of its own, which starts before the files are read."""
    from penstock.sandbox.process import Sandbox
    from penstock.sandbox.program import load_sandboxed

    return _with_source(path, checkpoint, config, partial(load_sandboxed, sandbox=Sandbox(), template=template))


def _with_source(
    path: Path, checkpoint: Checkpoint | None, config: EngineConfig, load: Callable[[Any, str], Tokenizer]
) -> Tokenizer:
    """Load the tokenizer from its folder or from a GGUF file's metadata."""
    if config.tokenizer:
        path, checkpoint = find_model(config.tokenizer, None, progress=False), None
    if checkpoint is not None or path.is_dir():
        return load(checkpoint.tokenizer_source() if checkpoint else path, str(path))
    source = open_checkpoint(path)
    try:
        return load(source.tokenizer_source(), str(path))
    finally:
        source.close()


def call_aside(function: Callable[..., Made], *values: Any) -> Future[Made]:
    """Begin a call in a thread of its own: kernels that pack weights leave Python to it."""
    thread = ThreadPoolExecutor(1)
    begun = thread.submit(function, *values)
    thread.shutdown(wait=False)
    return begun
