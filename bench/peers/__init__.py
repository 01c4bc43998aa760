"""One small driver per engine. Each runs in its own environment, holds one model, and takes commands as JSON lines."""
