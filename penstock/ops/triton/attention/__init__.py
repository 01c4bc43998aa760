"""GPU bodies of `penstock.ops.attention`."""
