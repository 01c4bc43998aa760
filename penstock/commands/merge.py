"""`penstock merge`: write a model with adapters in its weights."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.commands.output import write_text
from penstock.errors import InvalidRequest

Base = Annotated[str, typer.Argument(metavar="BASE", hidden=True)]
Folders = Annotated[list[str], typer.Argument(metavar="ADAPTER... OUT", hidden=True)]
Scales = Annotated[
    list[float] | None,
    typer.Option("--scale", help="Factor of an adapter; once for each, in their order. [default: 1]"),
]


def merge(base: Base, folders: Folders, scales: Scales = None) -> None:
    """Write a model with LoRA adapters in its weights.

    BASE is a model of safetensors, not quantized. Each ADAPTER is a folder that peft saved. OUT is a new folder.
    """
    from penstock.api.merge import merge_adapters

    *adapters, out = folders
    if not adapters:
        raise InvalidRequest(f"{out!r} is given, and no other folder: give BASE, an adapter's folder and OUT")
    count = merge_adapters(base, adapters, scales or [], out)
    write_text(f"{out}: {count} tensors changed\n")
