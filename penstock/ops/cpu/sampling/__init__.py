"""CPU bodies of `penstock.ops.sampling`."""
