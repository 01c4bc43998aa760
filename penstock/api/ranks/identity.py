"""The secret of a model's ranks, and the description by which they are compared before anything is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import InvalidConfig
from penstock.host.samples import sample_spans
from penstock.host.version import VERSION
from penstock.models.files import Checkpoint
from penstock.ops import cpu
from penstock.runner.ranks.link import SECRET_VARIABLE, Credentials, read_secret, require_long
from penstock.runner.ranks.messages import Identity

# what may differ between machines, and what concerns rank 0 alone
OWN = {
    *("node_rank", "master_addr", "threads", "tokenizer", "chat_template", "skip_tokenizer_init"),
    *("parse_special_tokens", "generation_config", "override_generation_config"),
    *("distributed_secret_file", "distributed_tls_certfile", "distributed_tls_keyfile", "distributed_tls_ca"),
}


def find_credentials(config: EngineConfig) -> Credentials | None:
    """Return the secret that the user gave, with the TLS files; None if there is none."""
    secret = os.environ.get(SECRET_VARIABLE)
    if config.distributed_secret_file is not None:
        found = read_secret(Path(config.distributed_secret_file).expanduser())
    elif secret is not None:
        found = require_long(secret.strip().encode(), SECRET_VARIABLE)
    else:
        return None
    files = (config.distributed_tls_certfile, config.distributed_tls_keyfile, config.distributed_tls_ca)
    return Credentials(found, *(file or "" for file in files))


def require_credentials(config: EngineConfig) -> Credentials:
    """Return the secret that the machines prove to each other."""
    found = find_credentials(config)
    if found is None:
        raise InvalidConfig(
            "ranks on several machines prove a secret to each other: give the same file to all with "
            f"--distributed-secret-file, or set {SECRET_VARIABLE} (openssl rand -hex 32 makes one)"
        )
    return found


def identify(config: EngineConfig, described: Mapping[str, Any], checkpoint: Checkpoint | None) -> Identity:
    """Describe this process for the others."""
    options = {field.name: getattr(config, field.name) for field in fields(EngineConfig) if field.name not in OWN}
    plain = json.loads(json.dumps(described, sort_keys=True, default=str))
    return Identity(VERSION, plain, {} if checkpoint is None else describe_weights(checkpoint), options, cpu.path())


def describe_weights(checkpoint: Checkpoint) -> dict[str, str]:
    """Describe each stored tensor by a digest of its size and of a few places in it, however files are cut; with dtype
    and shape where the model has it under the same name."""
    known = {name: f"{checkpoint.dtype(name)} {list(checkpoint.shape(name))} " for name in checkpoint.names()}
    return {name: known.get(name, "") + digest for name, digest in sample_spans(checkpoint.list_spans()).items()}
