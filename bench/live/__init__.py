"""A GPU server under live traffic, measured over HTTP.

`folder.py` writes a model of a real shape that needs no download, `server.py` starts Penstock on it or finds a server
that runs. `cases.py` says what is sent; `traffic.py` makes the requests, `clients.py` sends them from a few processes
by `bench.load`. `report.py` and `plot.py` show the lines of JSON that come out. Nothing here knows an engine.
"""
