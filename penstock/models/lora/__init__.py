"""Read LoRA adapters as PEFT saves them: a folder and a model's spec in; low-rank matrices by the model's linears out.

Everything that would change the mathematics and is not understood is refused by name. Nothing here knows of slots,
requests or engines.
"""

from __future__ import annotations

from penstock.models.lora.adapter import fingerprint, is_whole, read_adapter
from penstock.models.lora.merge import ScaledAdapter, merge
from penstock.models.lora.packing import Adapter

__all__ = ["Adapter", "ScaledAdapter", "fingerprint", "is_whole", "merge", "read_adapter"]
