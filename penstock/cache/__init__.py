"""Who owns which block. Token keys in, block ids out; knows nothing of tensors, requests' text or scheduling policy."""
