"""`penstock quantize` and `penstock quality`: make a smaller model, and measure what it loses."""
