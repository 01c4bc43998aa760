"""How the server is run: one frozen dataclass. Flags and documentation are generated from its fields."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from penstock.config import option
from penstock.errors import InvalidConfig, shown

LOG_FORMATS = ("text", "json")
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral", "pythonic")
REASONING_PARSERS = ("deepseek_r1", "qwen3", "mistral", "granite")
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = option(8000, "port to listen on; 0 takes a free one", least=0, most=65535)
    served_model_name: str | None = option(None, "name of the (first) model in the API, if not as given")
    api_key: tuple[str, ...] = option((), "key that clients must send; may be repeated, each is a tenant of its own")
    api_key_file: str | None = option(None, "file of keys, one per line: KEY [NAME [WEIGHT]]")
    admin_key: str | None = option(None, "key for the routes that change or show the whole server")
    public_prefix: tuple[str, ...] = option((), "file with a system prompt whose cache all tenants share; may be "
                                                "repeated")
    max_queued_requests: int = option(512, "most requests that wait; further ones get 429", least=1)
    max_queued_tokens: int = option(1 << 20, "most prompt tokens that wait", least=1)
    request_timeout: float | None = option(None, "seconds after which a request is ended", least=0)
    max_body_mb: int = option(32, "largest request body, in MiB", least=1, most=1024)
    memory_budget_gb: float | None = option(None, "memory for all models together, in GiB; idle ones make room",
                                            least=0)
    keep_alive: float | None = option(None, "seconds after which an idle further model is unloaded", least=0)
    shutdown_timeout: float = option(30.0, "seconds that answers have to finish when the server is stopped", least=0)
    hang_timeout: float = option(60.0, "seconds without a sign of life after which an engine is restarted", least=1)
    allowed_origins: tuple[str, ...] = option((), "web origins that may call the API (CORS); may be repeated")
    ssl_certfile: str | None = option(None, "certificate for HTTPS")
    ssl_keyfile: str | None = option(None, "private key for HTTPS")
    log_format: str = option("text", "how the log is written", LOG_FORMATS)
    tool_call_parser: str | None = option(None, "how the model writes tool calls, if not as its template tells",
                                          TOOL_CALL_PARSERS)
    reasoning_parser: str | None = option(None, "how the model marks its reasoning, if not as its template tells",
                                          REASONING_PARSERS)

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least, most = getattr(self, one.name), one.metadata["least"], one.metadata["most"]
            choices = one.metadata["choices"]
            if choices and value is not None and value not in choices:
                raise InvalidConfig(f"{one.name}={shown(value)} is unknown: choose one of {', '.join(choices)}")
            if value is not None and least is not None and value < least or most is not None and value > most:
                raise InvalidConfig(f"{one.name}={value} is out of range: it must be "
                                    + (f"{least} or more" if most is None else f"{least} to {most}"))
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise InvalidConfig("ssl_certfile and ssl_keyfile belong together: give both")

    @classmethod
    def from_options(cls, **options: Any) -> ServerConfig:
        return cls(**options)
