"""A certificate of this machine's own, and its key."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def write_pem(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """The paths of certificate and key."""
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    folder.mkdir(exist_ok=True)
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            str(key),
            "-out",
            str(certificate),
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def sign_pem(folder: Path, ca: tuple[Path, Path]) -> tuple[Path, Path]:
    """The paths of a certificate that a CA signed, and of its key."""
    folder.mkdir(exist_ok=True)
    key, request, certificate = folder / "key.pem", folder / "request.pem", folder / "cert.pem"
    ask = ["req", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request, "-subj", "/CN=rank"]
    sign = ["x509", "-req", "-in", request, "-CA", ca[0], "-CAkey", ca[1], "-CAcreateserial", "-days", "2"]
    for command in (ask, [*sign, "-out", certificate]):
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True)
    return certificate, key
