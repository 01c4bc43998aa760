"""Commands that judge a model on a machine: what it needs, if it computes rightly, which settings suit it."""
