"""The router's options, a frozen dataclass; flags and documentation are generated from its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.config import check_options, option
from penstock.errors import InvalidConfig
from penstock.server.config import LOG_FORMATS, MAX_QUEUED, MAX_SECONDS

POLICIES = ("prefix", "least_busy", "round_robin")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Options of `penstock route`."""

    host: str = option("127.0.0.1", "own address; 0.0.0.0: all")
    port: int = option(8080, "port to listen on; 0 takes a free one", least=0, most=65535)
    api_key: tuple[str, ...] = option((), "key that clients must send; each is a tenant")
    api_key_file: str | None = option(None, "file of keys, one per line: KEY [NAME [WEIGHT]]")
    admin_key: str | None = option(None, "key for admin routes")
    admin_key_file: str | None = option(None, "file with the admin key")
    upstream_api_key_file: str | None = option(None, "file with the key to send to the servers (default: the client's)")
    router_key_file: str | None = option(None, "file with the key that our servers have too, to continue streams")
    upstream_ca_file: str | None = option(None, "certificates to trust for https:// servers (default: the system's)")
    policy: str = option("prefix", "choice of the server: longest prefix, least busy, or in turn", POLICIES)
    max_queued_requests: int = option(
        512, "max requests that wait for a server's row; further ones get 429", least=1, most=MAX_QUEUED
    )
    max_upstream_requests: int | None = option(
        None, "max requests at once on a server that does not tell its rows (default: no limit)", least=1, most=65536
    )
    max_body_mb: int = option(32, "max size of a request body, in MiB", least=1, most=1024)
    max_files_mb: int = option(1024, "max size of an uploaded file, in MiB", least=1, most=1 << 20)
    heartbeat_s: float = option(1.0, "seconds between health checks of a server", least=0.05, most=3600)
    hang_timeout: float = option(10.0, "seconds without a health check until a server is dead", least=0.2, most=3600)
    shutdown_timeout: float = option(
        30.0, "seconds for running requests when the router stops", least=0, most=MAX_SECONDS
    )
    allowed_hosts: tuple[str, ...] = option((), "further Host header: NAME, *.NAME or *; repeatable")
    allowed_origins: tuple[str, ...] = option((), "allowed web origin (CORS), or * for any; repeatable")
    ssl_certfile: str | None = option(None, "certificate for HTTPS")
    ssl_keyfile: str | None = option(None, "private key for HTTPS")
    access_log: bool = option(True, "log every request, except successful health checks and /metrics")
    log_format: str = option("text", "log format", LOG_FORMATS)

    def __post_init__(self) -> None:
        check_options(self)
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise InvalidConfig("ssl_certfile and ssl_keyfile need each other: give both")

    @classmethod
    def from_options(cls, **options: Any) -> RouterConfig:
        return cls(**options)
