"""The installed version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("penstock")
except PackageNotFoundError:  # run from a source tree that was never installed
    VERSION = "(not installed)"
__version__ = VERSION
