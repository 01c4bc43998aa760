"""Processes for programs that others wrote: a model's tokenizer and chat template, a client's grammar.

In: jobs as msgspec messages. Out: plain results, or the reason why there is none. Each job runs under limits of memory
and time in a process that can be killed without loss, so nothing here is ever trusted to end by itself. This package
knows nothing of engines, HTTP or requests.
"""
