"""LoRA adapters as users name them."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.types.values import is_count, is_number, require

MAX_LORAS = 8  # summed in one request
MAX_SCALE = 1000.0


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its folder or GGUF file, with vLLM's fields. `scale` multiplies what it adds; `lora_local_path` is
    an older name of `lora_path`, and `base_model_name` has no effect."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    scale: float = 1.0
    lora_local_path: str | None = field(default=None, kw_only=True)
    long_lora_max_len: int | None = field(default=None, kw_only=True)
    base_model_name: str | None = field(default=None, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        self._require_neutral()
        require(isinstance(self.lora_name, str) and bool(self.lora_name), "lora_name", self.lora_name, "a name")
        require(is_count(self.lora_int_id) and self.lora_int_id > 0, "lora_int_id", self.lora_int_id, "1 or more")
        path = str(self.lora_path or self.lora_local_path or "")
        for name in ("lora_path", "lora_local_path"):
            object.__setattr__(self, name, path)
        require(bool(path) and "\0" not in path, "lora_path", path, "a folder")
        check_scale(self.scale)

    def _require_neutral(self) -> None:
        given, older = self.lora_path, self.lora_local_path
        require(
            not (given and older) or str(given) == str(older), "lora_local_path", older, "left out, or as lora_path"
        )
        name, length = "long_lora_max_len", self.long_lora_max_len
        require(length is None, name, length, "None: contexts are not lengthened for an adapter")

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
