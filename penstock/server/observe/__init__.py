"""Timelines of requests, the live view, traces and energy."""
