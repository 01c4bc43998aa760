"""CPU bodies of `penstock.ops.experts`."""
