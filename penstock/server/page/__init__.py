"""The page for browsers: files of our own, and the headers that confine them.

`static/` is served as it is. A view is a module in `static/views/` with a line in `static/views/index.js`.
"""
