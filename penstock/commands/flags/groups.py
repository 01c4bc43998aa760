"""Groups of the server's flags, as its help shows them."""

from __future__ import annotations

_GROUPS = {
    "Who may call": """
        host port api_key api_key_file admin_key admin_key_file router_key_file allowed_hosts
        allowed_origins ssl_certfile ssl_keyfile allow_delete trust_request_chat_template
    """,
    "Limits": """
        max_queued_requests max_queued_tokens request_timeout max_body_mb max_files_mb memory_budget_gb keep_alive
        shutdown_timeout hang_timeout
    """,
    "Engine": "data_parallel_size role kv_transfer_port",
    "API": """
        served_model_name lora_modules unknown_fields tool_call_parser reasoning_parser public_prefix data_folder
        root_path enable_force_include_usage return_tokens_as_token_ids
    """,
    "Log": "access_log enable_log_requests max_log_len log_format otlp_traces_endpoint",
}
SERVER_GROUPS = {name: group for group, names in _GROUPS.items() for name in names.split()}
RARE = (  # of groups that help explains
    *("admin_key_file", "router_key_file", "allowed_origins", "ssl_certfile", "ssl_keyfile", "allow_delete"),
    *("trust_request_chat_template", "max_log_len"),
)
FOREMOST = (  # of groups that help lists by name alone; explained where there is room
    *("device", "gpu_memory_utilization", "max_model_len", "kv_cache_tokens", "threads"),
)
MACHINES = (  # of the engine, in `serve --help` by --nnodes alone, which docs/parallel.md explains
    *("node_rank", "master_addr", "master_port", "distributed_secret_file", "ray_placement"),
    *("distributed_tls_certfile", "distributed_tls_keyfile", "distributed_tls_ca"),
)
