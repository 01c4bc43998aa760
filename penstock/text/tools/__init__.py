"""Tool calls in answers and in prompts.

In: an answer's text in pieces, special tokens included (a call's marker may be one); a request's tools and messages.
Out: events (text, a call's name, pieces of its arguments); messages that any chat template takes; a grammar that
forces a call. Tools are never run here, and arguments are not checked against their schemas.
"""

from penstock.text.tools.registry import TOOL_PARSERS, ToolParser, detect_parser

__all__ = ["TOOL_PARSERS", "ToolParser", "detect_parser"]
