"""`penstock top`: follow a server in a terminal, or print one look."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.commands.flags.options import Json
from penstock.commands.output import write_text
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.commands.top.feed import LookThread
    from penstock.commands.top.screen import Screen

SETTLE_S = 1.2  # before a single look: rates need two
REDRAW_S = 0.5
QUIT = b"qQ\x03\x04"  # also Ctrl-C and Ctrl-D
PLAIN_COLUMNS = 160  # of what is not written to a terminal

Url = Annotated[str | None, typer.Option("--url", help="URL of the server. [default: the only one on this machine]")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="PENSTOCK_API_KEY",
        show_envvar=False,
        help="Admin key of the server. [default: $PENSTOCK_API_KEY]",
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Print one snapshot and end, as without a terminal.")]


def top(url: Url = None, api_key: ApiKey = None, once: Once = False, as_json: Json = False) -> None:
    """Watch what a server does now.

    Shows running and waiting requests, the queue, the cache's blocks and rates. Press q to quit.
    """
    from rich.console import Console

    from penstock.commands.top.feed import LookThread, choose_url, take_snapshot
    from penstock.commands.top.screen import Screen

    if once or as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        where = choose_url(url)
        look = take_snapshot(where, api_key, SETTLE_S)
        if as_json:
            write_text(json.dumps(look, indent=2) + "\n")
            return
        console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_COLUMNS)
        screen = Screen(where)
        screen.take(look)
        console.print(screen.render(console.width))
        return
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        feed = LookThread(url, api_key, lambda: _wake(writer))
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        console = Console(highlight=False, _environ=environ)  # its size is the terminal's, also when that changes
        _follow(feed, Screen(feed.url), console, reader)
    finally:
        os.close(reader)
        os.close(writer)


def _wake(writer: int) -> None:
    with contextlib.suppress(OSError):  # full, or closed: it is awake, or it has ended
        os.write(writer, b"!")


def _follow(feed: LookThread, screen: Screen, console: Console, reader: int) -> None:
    """Draw each look until a key ends it."""
    from rich.live import Live

    feed.start()
    try:
        with _raw_keys(), Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
            while True:
                live.update(screen.render(console.width, console.height), refresh=True)
                ready = select.select([sys.stdin.fileno(), reader], [], [], REDRAW_S)[0]
                if reader in ready:
                    os.read(reader, 4096)
                if sys.stdin.fileno() in ready:
                    keys = os.read(sys.stdin.fileno(), 64)
                    if not keys or any(key in QUIT for key in keys):
                        return
                _take_news(feed, screen)
    finally:
        feed.close()


def _take_news(feed: LookThread, screen: Screen) -> None:
    from penstock.commands.top.feed import LookRefused

    screen.url = feed.url
    while not feed.news.empty():
        news = feed.news.get()
        if isinstance(news, LookRefused):
            raise news
        if isinstance(news, PenstockError):
            screen.trouble = f"{news}; trying again"
        else:
            screen.take(news)


@contextlib.contextmanager
def _raw_keys() -> Iterator[None]:
    """Get keys without Enter, and do not show them."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
