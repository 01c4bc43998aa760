"""Run a file of requests through the app, without a port.

In: lines in OpenAI's batch format. Out: one line per response, as it arrives. Lines already in the output are skipped.
"""
