"""The secret of a model's ranks, and the description by which they are compared before anything is loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import InvalidConfig
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
    return Identity(VERSION, digest_model(described, checkpoint), options, cpu.path())


def digest_model(described: Mapping[str, Any], checkpoint: Checkpoint | None) -> str:
    """Digest the config, and names, shapes, dtypes and bytes of the tensors: headers alone are read."""
    digest = hashlib.blake2b(json.dumps(described, sort_keys=True, default=str).encode(), digest_size=12)
    if checkpoint is not None:
        for name in sorted(checkpoint.names()):
            digest.update(f"{name} {tuple(checkpoint.shape(name))} {checkpoint.dtype(name)}\n".encode())
        digest.update(f"{checkpoint.quantization} {checkpoint.num_bytes}".encode())
    return digest.hexdigest()
