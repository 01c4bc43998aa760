"""Tool calls in answers and prompts.

In: streamed answer text, special tokens included (a marker may be one); a request's tools and messages. Out: events
(text, a call's name, pieces of its arguments); messages that any chat template takes; a grammar that forces a call.
Tools are never run here, and arguments are not checked against their schemas.
"""

from penstock.text.tools.parsers import TOOL_PARSERS, ToolParser, detect_parser

__all__ = ["TOOL_PARSERS", "ToolParser", "detect_parser"]
