"""Sandboxed processes for untrusted code: a model's tokenizer and chat template, a client's grammar.

In: jobs as msgspec messages. Out: plain results, or the reason for a refusal. Each job runs under memory and time
limits in a process that can be killed at no loss. This package knows nothing of engines, HTTP or requests.
"""
