"""The process and its machine: signals, cores, progress bars, files, version. Imports nothing of ours but errors."""
