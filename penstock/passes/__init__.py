"""Passes over a plain model: functions from model to model, or from block to block while it is loaded.

`observe` notes what linears are given, `adapt` adds to what they give, `lower` fuses for a device and comes last.
What no rule of `lower` matches runs plain.
"""
