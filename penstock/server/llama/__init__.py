"""llama-server's own routes: completions, infill, tokens, embeddings, properties.

Bodies in its names, translated to requests; answers in its format. Knows nothing of engines."""
