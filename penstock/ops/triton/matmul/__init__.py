"""GPU bodies of `penstock.ops.matmul`."""
