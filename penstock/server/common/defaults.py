"""Set in every body what the server's options ask for."""

from __future__ import annotations

from penstock.server.common.fields import SamplingBody, StreamOptions
from penstock.server.config import ServerConfig


def take_defaults(body: SamplingBody, config: ServerConfig) -> None:
    """Set what the server's options ask of every request."""
    body.return_tokens_as_token_ids |= config.return_tokens_as_token_ids
    if config.enable_force_include_usage and body.stream:
        body.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
