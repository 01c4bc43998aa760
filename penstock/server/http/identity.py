"""Tell whether two servers give the same tokens for the same request."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from penstock.engine.messages import Ready
from penstock.host.samples import find_cpu_features, sample_files
from penstock.host.version import VERSION

if TYPE_CHECKING:
    from penstock.server.model import ServedModel

SETTINGS = (
    "device",
    "dtype",
    "quantization",
    "activation_dtype",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "load_format",
    "seed",
    "max_model_len",
)


class Identities:
    """Hashes of models' weights and of what computes with them, each made once."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[ServedModel, tuple[Ready, str]] = WeakKeyDictionary()

    async def identify(self, model: ServedModel, loras: Sequence[str] = ()) -> str:
        """Return a hash of a model with adapters, given by their fingerprints."""
        facts = model.facts
        known = self._known.get(model)
        if known is None or known[0] is not facts:
            digest = await asyncio.to_thread(sample_files, model.path or Path(model.model))
            values = {name: value for name, value, _ in facts.settings if name in SETTINGS}
            known = facts, f"{VERSION}:{digest}:{facts.architecture}:{values}:{find_cpu_features()}"
            self._known[model] = known
        return hashlib.blake2b(f"{known[1]}:{sorted(loras)}".encode(), digest_size=12).hexdigest()
