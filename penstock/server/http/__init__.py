"""Shared by all routes: identity, decoded bodies, errors, warnings, events, logs."""
