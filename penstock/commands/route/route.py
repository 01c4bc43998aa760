"""`penstock route`: one address for several servers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.commands.flags.options import config_options
from penstock.host.interrupts import final_interrupts
from penstock.server.router.config import RouterConfig

Urls = Annotated[list[str], typer.Argument(metavar="URL...", hidden=True)]


@config_options(RouterConfig, "options")
def route(urls: Urls, *, options: dict[str, Any]) -> None:
    """Route requests to several servers, by what their caches hold.

    URL is a server's address, as http://HOST:PORT: penstock serve's, or any server of OpenAI's API. A server that dies
    or is restarted loses no stream: another goes on.
    """
    with final_interrupts():
        from penstock.server.http.log import set_up_log
        from penstock.server.router.run import route as run
    config = RouterConfig.from_options(**options)
    set_up_log(config.log_format)
    raise typer.Exit(run(urls, config))
