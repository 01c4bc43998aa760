"""LoRA adapters under vLLM's module name."""
