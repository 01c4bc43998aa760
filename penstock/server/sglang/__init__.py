"""SGLang's own routes: /generate, and what it tells of model and server.

Bodies in its names, translated to requests; answers in its format. Knows nothing of engines."""
