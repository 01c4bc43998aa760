"""The API process under streams, without a model: an engine process that only counts makes the tokens.

`worker.py` is that engine process, `server.py` starts `penstock serve` over it. `__main__.py` measures the CPU time of
the API process per streamed token, and `latency.py` what it and the messages add to a lone request's first token.
"""
