"""A model on several ranks: rank 0's side in the engine's process, the processes of the others, and their machines."""
