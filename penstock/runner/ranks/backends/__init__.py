"""Ways to start the processes of the other ranks. In: their tasks. Out: processes, and which of them has ended."""
