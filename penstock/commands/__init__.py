"""The commands behind `penstock`.

In: parsed arguments. Out: answers on standard output; figures, progress and errors on standard error. Nothing else
imports this package; heavy imports stay inside functions.
"""
