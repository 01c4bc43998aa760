"""The server's certificate and private key, checked before anything is started."""

from __future__ import annotations

import ssl

from penstock.errors import InvalidConfig
from penstock.regular import MIB, UnreadableFile, read_regular

MAX_PEM_BYTES = MIB


def make_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """A TLS context with certificate and key; None where the server speaks plain HTTP."""
    if certfile is None or keyfile is None:
        return None
    for name, path in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        try:
            read_regular(path, MAX_PEM_BYTES)
        except UnreadableFile as error:
            raise InvalidConfig(f"{name} {path} cannot be read: {error.reason}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password=_refuse_password)
    except InvalidConfig:
        raise
    except (OSError, ValueError) as error:  # also ssl.SSLError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise InvalidConfig(
            f"ssl_certfile={certfile} and ssl_keyfile={keyfile} cannot be used ({reason}): give a "
            "certificate and its own private key, both in PEM"
        ) from None
    return context


def _refuse_password() -> str:
    raise InvalidConfig(
        "ssl_keyfile is encrypted with a password: give a private key without one, as `openssl pkey` writes it"
    )
