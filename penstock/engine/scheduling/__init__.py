"""Makes plans: which sequences run, with how many tokens and which blocks; accounts for their results."""
