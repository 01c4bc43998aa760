"""A file of requests, answered by the same application without a port.

In: lines in OpenAI's batch format. Out: one line per request, as soon as its answer is there. What is in the output
already is not asked again.
"""
