"""GPU bodies of `penstock.ops.sampling`."""
