"""Chat templates, the Jinja sandbox, and the reasoning part of answers."""
