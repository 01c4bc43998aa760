"""One rank: a plan in, a result out. Owns the model, its tensors and the rows; knows nothing of queues or policy."""
