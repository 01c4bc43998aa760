"""One rank on a CPU: plans run at once; small steps are taped and replayed."""
