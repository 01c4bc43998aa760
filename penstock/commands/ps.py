"""`penstock ps` and `penstock stop`: the servers on this machine."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.commands.flags.options import Json
from penstock.commands.output import Table, write_note, write_text
from penstock.errors import InvalidRequest, PenstockError

if TYPE_CHECKING:
    from penstock.server.pidfile import RunningServer

ASK_S = 3.0
LOOK_S = 0.05

ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="PENSTOCK_API_KEY",
        show_envvar=False,
        help="Admin key of the servers, to see what they run. [default: $PENSTOCK_API_KEY]",
    ),
]
Which = Annotated[str | None, typer.Argument(metavar="[PID|URL]", hidden=True)]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait until the server has stopped.")]


def ps(api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show the servers on this machine and what they run."""
    from penstock.server.pidfile import list_servers

    shown = [_describe_server(server, api_key) for server in list_servers()]
    if as_json:
        write_text(json.dumps(shown, indent=2) + "\n")
    elif not shown:
        write_note("no server runs on this machine; penstock serve starts one")
    else:
        write_text(_servers(shown) + _requests(shown))


def stop(which: Which = None, timeout: Timeout = 60.0) -> None:
    """Stop a server after it finishes its answers.

    PID or URL selects one of several; penstock ps lists them.
    """
    import os
    import signal

    if not 0 <= timeout < math.inf:
        raise InvalidRequest(f"--timeout={timeout} is out of range: it must be 0 or more")
    server = _choose_server(which)
    pid = server.record.pid
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise PenstockError(f"server {pid} is another user's: it cannot be stopped from here") from None
    end = time.monotonic() + timeout
    while server.alive:
        if time.monotonic() > end:
            raise PenstockError(
                f"server {pid} still runs after {timeout:g} s, perhaps to finish its answers: wait, "
                f"stop it again to cut them off, or force it with `kill -9 {pid}`"
            )
        time.sleep(LOOK_S)
    write_note(f"stopped server {pid} at {server.record.url}")


def _choose_server(which: str | None) -> RunningServer:
    from penstock.server.pidfile import list_servers

    servers = list_servers()
    known = ", ".join(f"{server.record.pid} ({server.record.url})" for server in servers)
    if not servers:
        raise InvalidRequest("no server runs on this machine, so there is nothing to stop")
    if which is None:
        if len(servers) > 1:
            raise InvalidRequest(f"{len(servers)} servers run: say which to stop, by PID or URL: {known}")
        return servers[0]
    url = which.rstrip("/").replace("//localhost", "//127.0.0.1")
    for server in servers:
        if which == str(server.record.pid) or url == server.record.url:
            return server
    raise InvalidRequest(f"no server here is {which!r}: those that run are {known}")


def _describe_server(server: RunningServer, api_key: str | None) -> dict[str, Any]:
    """Describe the server with its requests, or why they are not known."""
    facts = {**asdict(server.record), "requests": None, "error": None}
    try:
        with open_route(server.record.url, "/admin/running", api_key, ASK_S) as answer:
            facts["requests"] = json.load(answer)["requests"]
    except (OSError, ValueError, KeyError) as error:
        closed = getattr(error, "code", None) in (401, 403)
        facts["error"] = "it needs its admin key: give --api-key" if closed else f"{type(error).__name__}: {error}"
    return facts


def open_route(url: str, path: str, api_key: str | None, timeout_s: float) -> Any:
    """Open a route of a server; the answer is a file and a context manager. Proxies are not asked."""
    import urllib.request

    # http.client would write Latin-1; send non-ASCII keys as UTF-8
    headers = {"Authorization": f"Bearer {api_key}".encode().decode("latin-1")} if api_key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(urllib.request.Request(loopback_url(url) + path, headers=headers), timeout=timeout_s)


def loopback_url(url: str) -> str:
    """Return the loopback URL of a server that listens on all addresses: only there no key means admin."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _servers(shown: list[dict[str, Any]]) -> str:
    table = Table("PID", "URL", "MODELS", "UP", "RUNNING", "WAITING")
    for server in shown:
        states = [request["state"] for request in server["requests"] or ()]
        counts = ["?" if server["error"] else str(states.count(state)) for state in ("running", "waiting")]
        table.add(
            str(server["pid"]),
            server["url"],
            ", ".join(server["models"]),
            readable_seconds(time.time() - server["started_s"]),
            *counts,
        )
    notes = [f"{server['pid']}: {server['error']}\n" for server in shown if server["error"]]
    return table.plain() + "".join(notes)


def _requests(shown: list[dict[str, Any]]) -> str:
    rows = [(server["pid"], request) for server in shown for request in server["requests"] or ()]
    has_replicas = any("replicas" in one for _, one in rows)
    where = ("REPLICA",) if has_replicas else ()
    table = Table("PID", "REQUEST", "MODEL", *where, "STATE", "AGE", "PROMPT", "OUTPUT", "AT MOST")
    for pid, one in rows:
        places = ["+".join(map(str, one.get("replicas", ()))) or "-"] if has_replicas else []
        table.add(
            str(pid),
            one["id"],
            one["model"],
            *places,
            one["state"],
            readable_seconds(one["age_s"]),
            str(one["num_prompt_tokens"]),
            str(one["num_output_tokens"]),
            str(one["max_tokens"]),
        )
    return "\n" + table.plain() if rows else ""


def readable_seconds(seconds: float) -> str:
    """Format a duration: 12 s, 5 min, 3 h, 4 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
