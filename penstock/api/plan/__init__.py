"""Forecast a model on a machine from its headers: memory, speed, and the one change that would make it fit.

In: a checkpoint whose tensors are never read, options and a device by name. Out: a `Forecast`. Memory is counted on the
model that the loader builds without weights, and settings come from `resolve`, as in a real start.
"""
