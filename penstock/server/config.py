"""Server options, a frozen dataclass; flags and documentation are generated from its fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config import check_options, option
from penstock.errors import InvalidConfig, quote

LOG_FORMATS = ("text", "json")
UNKNOWN_FIELDS = ("ignore", "refuse")
ROLES = ("prefill", "decode", "both")  # of engines: who computes prompts, and who answers
PREFILL, DECODE, BOTH = ROLES
ANY = "*"  # matches any name
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral", "pythonic", "openai")
REASONING_PARSERS = ("deepseek_r1", "qwen3", "mistral", "granite", "openai_gptoss")
MIB = 1 << 20
MAX_SECONDS = 366 * 86400  # max of any timeout
MAX_QUEUED = 1 << 40
MAX_MEMORY_GB = 1 << 20


def check_roles(roles: Sequence[str], num_engines: int, has_router: bool = False) -> None:
    """Refuse roles without an engine that prefills, or one that decodes. Behind a router, other servers may have it."""
    for role in roles:
        if role not in ROLES:
            raise InvalidConfig(f"role={quote(role)} is unknown: choose one of {', '.join(ROLES)}")
    if roles and num_engines not in (1, len(roles)):
        raise InvalidConfig(f"{len(roles)} roles for data_parallel_size={num_engines} engines: give one for each")
    for role, work in (("prefill", "decode"), ("decode", "prefill")):
        if roles and all(one == role for one in roles) and not has_router:
            raise InvalidConfig(
                f"role={role} is all there is: add an engine with role={work} or both; or, for servers of both roles "
                "behind penstock route, set router_key_file"
            )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of `penstock serve`."""

    host: str = option("127.0.0.1", "own address; 0.0.0.0: all")
    port: int = option(8000, "port to listen on; 0 takes a free one", least=0, most=65535)
    served_model_name: tuple[str, ...] = option(
        (), "name of the (first) model in the API; repeatable, * accepts any name"
    )
    lora_modules: tuple[str, ...] = option(
        (), "adapter to serve, as NAME=FOLDER or vLLM's JSON object; several may follow"
    )
    api_key: tuple[str, ...] = option((), "key that clients must send; each is a tenant")
    api_key_file: str | None = option(None, "file of keys, one per line: KEY [NAME [WEIGHT]]")
    admin_key: str | None = option(None, "key for admin routes")
    admin_key_file: str | None = option(None, "file with the admin key")
    router_key_file: str | None = option(None, "file with the key of penstock route")
    public_prefix: tuple[str, ...] = option(
        (), "file with a system prompt whose KV cache all tenants share; repeatable"
    )
    data_parallel_size: int = option(1, "engines per model", least=1, most=64)
    role: tuple[str, ...] = option((), "role of each engine: prefill, decode or both; needs kv_offloading_path")
    kv_transfer_port: int | None = option(
        None, "port from which decode servers fetch prompts' cache blocks; 0 takes a free one", least=0, most=65535
    )
    max_queued_requests: int = option(512, "max waiting requests; further ones get 429", least=1, most=MAX_QUEUED)
    max_queued_tokens: int = option(1 << 20, "max waiting prompt tokens", least=1, most=MAX_QUEUED)
    request_timeout: float | None = option(None, "max seconds per request", least=0, most=MAX_SECONDS)
    max_body_mb: int = option(32, "max size of a request body, in MiB", least=1, most=1024)
    data_folder: str | None = option(None, "folder for files and batches (default: one per port under PENSTOCK_HOME)")
    max_files_mb: int = option(1024, "max size of all uploaded files together, in MiB", least=1, most=1 << 30)
    memory_budget_gb: float | None = option(
        None, "memory for all models together, in GiB; idle models are unloaded to fit", least=0, most=MAX_MEMORY_GB
    )
    keep_alive: float | None = option(
        None, "seconds until an idle model, except the first, is unloaded", least=0, most=MAX_SECONDS
    )
    shutdown_timeout: float = option(
        30.0, "seconds for running requests when the server stops", least=0, most=MAX_SECONDS
    )
    hang_timeout: float = option(
        60.0, "seconds without a heartbeat until an engine is restarted", least=1, most=MAX_SECONDS
    )
    allowed_hosts: tuple[str, ...] = option((), "further Host header: NAME, *.NAME or *; repeatable")
    allowed_origins: tuple[str, ...] = option((), "allowed web origin (CORS), or * for any; repeatable")
    unknown_fields: str = option(
        "ignore", "warn of unknown body fields, or refuse them with 400 as misspelt ones are", UNKNOWN_FIELDS
    )
    allow_delete: bool = option(False, "allow DELETE /api/delete to delete model files")
    ssl_certfile: str | None = option(None, "certificate for HTTPS")
    ssl_keyfile: str | None = option(None, "private key for HTTPS")
    root_path: str = option("", "path under which a proxy serves this, such as /llm; requests may keep or drop it")
    enable_force_include_usage: bool = option(False, "send usage with every chunk of every stream")
    return_tokens_as_token_ids: bool = option(False, "name tokens of log probabilities as token_id:ID")
    trust_request_chat_template: bool = option(False, "allow chat_template in requests")
    access_log: bool = option(True, "log every request, except successful health checks and /metrics")
    enable_log_requests: bool = option(False, "log prompts and parameters of requests")
    max_log_len: int | None = option(None, "max characters (or ids) of a logged prompt", least=0, most=1 << 30)
    log_format: str = option("text", "log format", LOG_FORMATS)
    otlp_traces_endpoint: str | None = option(
        None, "URL of an OpenTelemetry collector to send traces to, over HTTP; needs penstock[otel]"
    )
    tool_call_parser: str | None = option(
        None, "format of tool calls (default: detected from the chat template)", TOOL_CALL_PARSERS
    )
    reasoning_parser: str | None = option(
        None, "format of reasoning (default: detected from the chat template)", REASONING_PARSERS
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise InvalidConfig(f"root_path={quote(self.root_path)} is not valid: give a path such as /llm")
        if "" in self.served_model_name:
            raise InvalidConfig("served_model_name='' is empty: give a name, or leave it out")
        check_roles(self.role, self.data_parallel_size, self.router_key_file is not None)
        if self.kv_transfer_port is not None and self.lone_role != PREFILL:
            raise InvalidConfig(
                f"kv_transfer_port={self.kv_transfer_port} is for a server that computes prompts for others: set "
                "role=prefill, or leave it out"
            )
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise InvalidConfig("ssl_certfile and ssl_keyfile need each other: give both")

    @property
    def num_engines(self) -> int:
        """Engines per model."""
        return len(self.role) or self.data_parallel_size

    @property
    def lone_role(self) -> str:
        """The role of all engines, where other servers have the other one; empty if this server does both."""
        alone = {PREFILL, DECODE} & set(self.role)
        return alone.pop() if len(set(self.role)) == len(alone) == 1 else ""

    @property
    def first_name(self) -> str | None:
        return next((name for name in self.served_model_name if name != ANY), None)

    @classmethod
    def from_options(cls, **options: Any) -> ServerConfig:
        return cls(**options)
