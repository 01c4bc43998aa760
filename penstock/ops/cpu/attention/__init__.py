"""CPU bodies of `penstock.ops.attention`."""
