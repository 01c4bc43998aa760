"""Logits processors: user callables that edit a row's logits first.

Each is called as in vLLM: `(output_token_ids, logits)`, or with the prompt's ids first if it takes three arguments.
`logits` is a float32 CPU tensor [V] that it may change or replace. The result must depend on the arguments alone, since
a position may be computed more than once.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.ops import cpu
from penstock.sampling.logits import Array, NothingAllowed

PROMPT_PARAMETERS = 3  # of a processor that also takes the prompt


class ProcessorFailed(NothingAllowed):
    """A logits processor raised, or returned something that is not logits."""


def apply_processors(
    processors: Sequence[Callable[..., Any]], prompt: list[int], output: list[int], logits: Array
) -> Array:
    """Run the processors in turn; return new logits [V]."""
    values = torch.from_numpy(logits.copy())
    with torch.no_grad(), cpu.limit_torch():  # as in a step: one thread gives the same bits on every machine
        for index, processor in enumerate(processors):
            name = f"logits_processors[{index}] ({_name(processor)})"
            texts = (list(prompt), list(output)) if _takes_prompt(processor) else (list(output),)
            try:
                found = processor(*texts, values)
            except Exception as error:
                raise ProcessorFailed(f"{name} failed: {_last_line(error)}") from error
            values = _check_result(found, len(logits), name)
    result: Array = values.numpy()
    return result


def _check_result(result: Any, size: int, name: str) -> torch.Tensor:
    if not isinstance(result, torch.Tensor) or result.shape != (size,):
        shape = (
            f"a tensor of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        )
        raise ProcessorFailed(f"{name} returned {shape}: it must return the logits, a tensor of shape ({size},)")
    values = result.detach().to("cpu", torch.float32).contiguous()
    top = float(values.numpy().max())
    if math.isnan(top) or top == math.inf:
        raise ProcessorFailed(f"{name} returned NaN or infinity among the logits: use -inf to rule a token out")
    return values


def _takes_prompt(processor: Callable[..., Any]) -> bool:
    try:
        return len(inspect.signature(processor).parameters) == PROMPT_PARAMETERS
    except (TypeError, ValueError):  # C callables have no signature
        return False


def _name(processor: Callable[..., Any]) -> str:
    return str(getattr(processor, "__name__", type(processor).__name__))


def _last_line(error: Exception) -> str:
    """Return the traceback's last line and its line in the callable."""
    frames = traceback.extract_tb(error.__traceback__)
    text = " ".join("".join(traceback.format_exception_only(type(error), error)).split())
    return f"{text[:400]} (line {frames[-1].lineno} of {frames[-1].name})" if frames else text[:400]
