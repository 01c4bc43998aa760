"""Compare two models on a text, and how fast they decode."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.api.model_files import find_model, load_in_sandbox
from penstock.api.perplexity import tokens_before, windows
from penstock.config import EngineConfig
from penstock.errors import InvalidModel, InvalidRequest
from penstock.models.files import Checkpoint, open_checkpoint
from penstock.models.spec import ModelSpec, spec_from_config
from penstock.quantize.compare import Text, compare
from penstock.quantize.report.figures import QualityReport, Speeds
from penstock.types import SamplingParams

if TYPE_CHECKING:
    from penstock.api.llm import LLM
    from penstock.text.tokenizers.tokenizer import Tokenizer

WINDOW = 512
MAX_TOKENS = 4096  # scored, unless the user says otherwise
MIN_TOKENS = 8
TURNS, PROMPT_TOKENS, OUTPUT_TOKENS, MAX_MODEL_LEN = 3, 16, 48, 256  # of measuring speeds
BUNDLED = Path(__file__).parents[2] / "quantize" / "calibration"

Progress = Callable[[int, int], None]


def tokenizer_of(path: Path, checkpoint: Checkpoint) -> Tokenizer:
    return load_in_sandbox(path, checkpoint, EngineConfig(), None)


def measure_quality(
    first: str,
    second: str,
    text: str,
    named: str,
    *,
    max_tokens: int | None = None,
    progress: Progress = lambda done, total: None,
) -> QualityReport:
    """Compare models by name on a text, which the report calls `named`."""
    if max_tokens is not None and max_tokens < MIN_TOKENS:
        raise InvalidRequest(f"max_tokens={max_tokens} is too few for a comparison: give {MIN_TOKENS} or more")
    paths = [find_model(name, None, False) for name in (first, second)]
    with ExitStack() as held:
        checkpoints = [open_checkpoint(path) for path in paths]
        for checkpoint in checkpoints:
            held.callback(checkpoint.close)
        tokens = _encode(paths, checkpoints, text, max_tokens or MAX_TOKENS)
        comparison = compare(checkpoints[0], checkpoints[1], tokens, progress)
        sizes = checkpoints[0].num_bytes, checkpoints[1].num_bytes
    return QualityReport(first, second, named, comparison, sizes)


def _encode(paths: list[Path], checkpoints: list[Checkpoint], text: str, max_tokens: int) -> Text:
    """Cut the text's tokens into windows, each with the tokenizer's prefix; refuse models that split it otherwise."""
    found, befores = [], []
    for path, checkpoint in zip(paths, checkpoints):
        tokenizer = tokenizer_of(path, checkpoint)
        found.append(tokenizer.encode(text, add_special_tokens=False)[:max_tokens])
        befores.append(tokens_before(tokenizer))
        tokenizer.program.rest()
    if found[0] != found[1]:
        raise InvalidModel(
            f"the tokenizers of {paths[0]} and {paths[1]} split the text differently, so their predictions cannot be "
            "compared token by token"
        )
    if len(found[0]) < MIN_TOKENS:
        raise InvalidRequest(f"the text has {len(found[0])} tokens: give one of {MIN_TOKENS} or more")
    before, tokens = befores[0], found[0]
    cut, firsts = [], []
    window = min([WINDOW, *(spec_from_config(checkpoint.config).max_positions for checkpoint in checkpoints)])
    for place in windows(len(tokens), window, max(1, window * 3 // 4 - len(before)), len(before)):
        cut.append(before + tokens[place.begin : place.end])
        firsts.append(len(before) + place.first - place.begin)
    return Text(cut, firsts)


def measure_speeds(first: str, second: str, device: str = "auto") -> Speeds:
    """Decode the same prompts with both models → tokens per second of each turn. One model at a time is in memory."""
    from penstock.api.llm import LLM

    paths = [find_model(name, None, False).absolute() for name in (first, second)]  # no short name is a full path
    specs = [_read_spec(path) for path in paths]
    vocabulary = min(spec.vocab_size for spec in specs)
    max_model_len = min(MAX_MODEL_LEN, *(spec.max_positions for spec in specs))
    options: dict[str, Any] = {"max_model_len": max_model_len, "progress": False, "skip_tokenizer_init": True}
    found: tuple[list[float], list[float]] = ([], [])
    devices = []
    for speeds, path in zip(found, paths):
        with LLM(str(path), device=device, **options) as llm:
            devices.append(llm.service.assembly.settings.device)
            if len(set(devices)) > 1:
                raise InvalidRequest(
                    f"{first} runs on {devices[0]} and {second} on {devices[1]}, so their speeds do not compare: give "
                    "--no-speed"
                )
            for turn in range(TURNS + 1):
                rng = random.Random(turn)
                speed = _decode(llm, [rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)])
                if turn:  # the first one warms up
                    speeds.append(speed)
    return found


def _read_spec(path: Path) -> ModelSpec:
    with closing(open_checkpoint(path)) as checkpoint:
        return spec_from_config(checkpoint.config)


def _decode(llm: LLM, prompt: list[int]) -> float:
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)
    begin = time.perf_counter()
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    return len(output.outputs[0].token_ids) / (time.perf_counter() - begin)


def read_bundled(name: str) -> str:
    return (BUNDLED / name).read_text(encoding="utf-8")
