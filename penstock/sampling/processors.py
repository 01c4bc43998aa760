"""Callables of a user that change a row's logits before anything else does.

Each is called as vLLM's are: `(output_token_ids, logits)`, or with the prompt's ids before these where it takes three;
`logits` is a float32 tensor [V] on the CPU that it may change or replace. Its result must depend on its arguments
alone, since a position may be computed more than once.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.ops import cpu
from penstock.sampling.arrays import Array, NothingAllowed

PROMPT_PARAMETERS = 3  # of a callable that is given the prompt, too


class ProcessorFailed(NothingAllowed):
    """A callable raised, or returned what are no logits."""


def apply_processors(
    processors: Sequence[Callable[..., Any]], prompt: list[int], output: list[int], logits: Array
) -> Array:
    """New logits [V], one callable's result given to the next."""
    values = torch.from_numpy(logits.copy())
    with torch.no_grad(), cpu.torch_alone():  # as within a step: one thread gives the same numbers everywhere
        for index, processor in enumerate(processors):
            name = f"logits_processors[{index}] ({_name(processor)})"
            texts = (list(prompt), list(output)) if _takes_prompt(processor) else (list(output),)
            try:
                found = processor(*texts, values)
            except Exception as error:
                raise ProcessorFailed(f"{name} failed: {_last_line(error)}") from error
            values = _checked(found, len(logits), name)
    result: Array = values.numpy()
    return result


def _checked(found: Any, size: int, name: str) -> torch.Tensor:
    if not isinstance(found, torch.Tensor) or found.shape != (size,):
        shape = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise ProcessorFailed(f"{name} returned {shape}: it must return the logits, a tensor of shape ({size},)")
    values = found.detach().to("cpu", torch.float32).contiguous()
    top = float(values.numpy().max())
    if math.isnan(top) or top == math.inf:
        raise ProcessorFailed(f"{name} returned NaN or infinity among the logits: use -inf to rule a token out")
    return values


def _takes_prompt(processor: Callable[..., Any]) -> bool:
    try:
        return len(inspect.signature(processor).parameters) == PROMPT_PARAMETERS
    except (TypeError, ValueError):  # a callable of C has no signature
        return False


def _name(processor: Callable[..., Any]) -> str:
    return str(getattr(processor, "__name__", type(processor).__name__))


def _last_line(error: Exception) -> str:
    """The traceback's last line, and where in the callable it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    text = " ".join("".join(traceback.format_exception_only(type(error), error)).split())
    return f"{text[:400]} (line {frames[-1].lineno} of {frames[-1].name})" if frames else text[:400]
