"""CPU bodies of `penstock.ops.matmul`."""
