"""Load on a server that speaks OpenAI's chat interface: what is sent, when, and what came back.

`words.py` and `workload.py` make chats from a seed, `loop.py` sends them (so many at once, or so many a second) through
`wire.py`, which only notes bytes and times; `stream.py` reads them afterwards, `figures.py` and `table.py` make figures
of them. `trial.py` is one measurement of one server; `servers.py` starts servers, `contest.py` compares them. Nothing
here knows an engine.
"""
