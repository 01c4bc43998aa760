"""How the server is run: one frozen dataclass. Flags and documentation are generated from its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.config import check_options, option
from penstock.errors import InvalidConfig

LOG_FORMATS = ("text", "json")
UNKNOWN_FIELDS = ("ignore", "refuse")
ANY = "*"  # of names
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral", "pythonic")
REASONING_PARSERS = ("deepseek_r1", "qwen3", "mistral", "granite")
MIB = 1 << 20
MAX_SECONDS = 366 * 86400  # of any timeout
MAX_QUEUED = 1 << 40
MAX_MEMORY_GB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = option(8000, "port to listen on; 0 takes a free one", least=0, most=65535)
    served_model_name: tuple[str, ...] = option(
        (), "name of the (first) model in the API, if not as given; may be repeated, and * takes any name"
    )
    api_key: tuple[str, ...] = option((), "key that clients must send; may be repeated, each is a tenant of its own")
    api_key_file: str | None = option(None, "file of keys, one per line: KEY [NAME [WEIGHT]]")
    admin_key: str | None = option(None, "key for the routes that change or show the whole server")
    admin_key_file: str | None = option(None, "file with the admin key")
    public_prefix: tuple[str, ...] = option(
        (), "file with a system prompt whose cache all tenants share; may be repeated"
    )
    max_queued_requests: int = option(512, "most requests that wait; further ones get 429", least=1, most=MAX_QUEUED)
    max_queued_tokens: int = option(1 << 20, "most prompt tokens that wait", least=1, most=MAX_QUEUED)
    request_timeout: float | None = option(None, "seconds after which a request is ended", least=0, most=MAX_SECONDS)
    max_body_mb: int = option(32, "largest request body, in MiB", least=1, most=1024)
    data_folder: str | None = option(None, "folder for files and batches, if not one for the port under PENSTOCK_HOME")
    max_files_mb: int = option(1024, "room for the files of all clients together, in MiB", least=1, most=1 << 30)
    memory_budget_gb: float | None = option(
        None, "memory for all models together, in GiB; idle ones make room", least=0, most=MAX_MEMORY_GB
    )
    keep_alive: float | None = option(
        None, "seconds after which an idle further model is unloaded", least=0, most=MAX_SECONDS
    )
    shutdown_timeout: float = option(
        30.0, "seconds that answers have to finish when the server is stopped", least=0, most=MAX_SECONDS
    )
    hang_timeout: float = option(
        60.0, "seconds without a sign of life after which an engine is restarted", least=1, most=MAX_SECONDS
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "name this server goes by besides its address, *.NAME, or * for any; may be repeated"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "web origin whose pages may call the API (CORS), or * for any; may be repeated"
    )
    unknown_fields: str = option(
        "ignore",
        "unknown fields of a body are ignored with a warning, or are a 400 as misspelt ones are",
        UNKNOWN_FIELDS,
    )
    allow_delete: bool = option(False, "let DELETE /api/delete remove models' files")
    ssl_certfile: str | None = option(None, "certificate for HTTPS")
    ssl_keyfile: str | None = option(None, "private key for HTTPS")
    trust_request_chat_template: bool = option(False, "let requests bring a chat_template of their own")
    access_log: bool = option(True, "log a line for each request, but for health checks and /metrics that succeed")
    log_format: str = option("text", "how the log is written", LOG_FORMATS)
    tool_call_parser: str | None = option(
        None, "how the model writes tool calls, if not as its template tells", TOOL_CALL_PARSERS
    )
    reasoning_parser: str | None = option(
        None, "how the model marks its reasoning, if not as its template tells", REASONING_PARSERS
    )

    def __post_init__(self) -> None:
        check_options(self)
        if "" in self.served_model_name:
            raise InvalidConfig("served_model_name='' is no name: give one, or leave it out")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise InvalidConfig("ssl_certfile and ssl_keyfile belong together: give both")

    @property
    def first_name(self) -> str | None:
        """The first model's, if it is not called as it was given."""
        return next((name for name in self.served_model_name if name != ANY), None)

    @classmethod
    def from_options(cls, **options: Any) -> ServerConfig:
        return cls(**options)
