"""OpenAI's API, and the routes that vLLM and llama-server add to it."""
