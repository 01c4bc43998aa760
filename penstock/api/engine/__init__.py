"""From settings to an engine: weights are loaded by them, and pool, scheduler and executor are made."""
