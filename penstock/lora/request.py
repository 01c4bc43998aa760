"""Adapters of requests, under vLLM's module name."""

from __future__ import annotations

from penstock.types import LoRARequest

__all__ = ["LoRARequest"]
