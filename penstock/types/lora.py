"""LoRA adapters as users name them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types.values import is_count, is_number, require

MAX_LORAS = 8  # summed in one request
MAX_SCALE = 1000.0


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its folder, with vLLM's fields in vLLM's order. `scale` multiplies what it adds."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        require(isinstance(self.lora_name, str) and bool(self.lora_name), "lora_name", self.lora_name, "a name")
        require(is_count(self.lora_int_id) and self.lora_int_id > 0, "lora_int_id", self.lora_int_id, "1 or more")
        object.__setattr__(self, "lora_path", str(self.lora_path))
        require(bool(self.lora_path) and "\0" not in self.lora_path, "lora_path", self.lora_path, "a folder")
        check_scale(self.scale)

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


def check_scale(scale: object) -> None:
    """Refuse a factor that is no number, or a huge one."""
    fits = is_number(scale) and abs(scale) <= MAX_SCALE  # type: ignore[arg-type]
    require(fits, "scale", scale, f"{-MAX_SCALE:g} to {MAX_SCALE:g}")
