"""`penstock pull`, `list`, `rm` and `merge`: the models on this machine."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.commands.flags.options import Json
from penstock.commands.output import Table, write_note, write_text
from penstock.errors import InvalidRequest
from penstock.types.lora import check_scale

Names = Annotated[list[str], typer.Argument(metavar="MODEL...", hidden=True)]
Base = Annotated[str, typer.Argument(metavar="BASE", hidden=True)]
Folders = Annotated[list[str], typer.Argument(metavar="ADAPTER... OUT", hidden=True)]
Scales = Annotated[
    list[float] | None,
    typer.Option("--scale", help="Factor of an adapter; once for each, in their order. [default: 1]"),
]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the Hugging Face hub.")]


def pull(models: Names, revision: Revision = None) -> None:
    """Fetch models without running them."""
    from penstock.hub import pull as fetch

    for name in models:
        write_text(f"{fetch(name, revision)}\n")


def list_(as_json: Json = False) -> None:
    """Show the models on this machine."""
    from penstock.hub import home, list_models
    from penstock.hub.download_errors import readable_bytes

    models = list_models()
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                "name": model.name,
                "source": model.source,
                "path": str(model.path),
                "format": model.format,
                "num_bytes": model.num_bytes,
                "modified_s": model.modified_s,
            }
            for model in models
        ]
        write_text(json.dumps(rows, indent=2) + "\n")
        return
    if not models:
        write_note(f"no models under {home()} yet; penstock pull smollm2 fetches one")
        return
    table = Table("NAME", "SIZE", "FORMAT", "MODIFIED", "PATH")
    for model in models:
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified_s))
        table.add(model.name, readable_bytes(model.num_bytes), model.format, day, str(model.path))
    write_text(table.plain())


def rm(models: Names) -> None:
    """Delete models from this machine."""
    from penstock.hub import remove_model
    from penstock.hub.download_errors import readable_bytes

    for name in models:
        removed = remove_model(name)
        write_note(f"removed {removed.name}: {readable_bytes(removed.num_bytes)} freed")


def merge(base: Base, folders: Folders, scales: Scales = None) -> None:
    """Write a model with LoRA adapters in its weights.

    BASE is a model of safetensors, not quantized. Each ADAPTER is a folder that peft saved. OUT is a new folder.
    """
    *adapters, out = folders
    if not adapters:
        raise InvalidRequest(f"{out!r} is given, and no other folder: give BASE, an adapter's folder and OUT")
    if scales and len(scales) != len(adapters):
        raise InvalidRequest(f"{len(adapters)} adapters came with {len(scales)} scales: give one --scale for each")
    for scale in scales or ():
        check_scale(scale)
    from penstock.hub import resolve_model
    from penstock.models.lora import ScaledAdapter
    from penstock.models.lora import merge as merge_into

    factors = scales or [1.0] * len(adapters)
    chosen = [ScaledAdapter(Path(folder), scale) for folder, scale in zip(adapters, factors)]
    count = merge_into(resolve_model(base, progress=sys.stderr.isatty()), chosen, Path(out))
    write_text(f"{out}: {count} tensors changed\n")
