"""vLLM's names for the Python interface: LLMEngine, AsyncLLMEngine, EngineArgs."""
