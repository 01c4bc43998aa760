"""Anthropic's messages, translated.

In: bodies of /v1/messages and /v1/messages/count_tokens. Out: messages, events and errors in Anthropic's shapes. What
is asked becomes a chat body and is answered like any other; nothing here knows how text is made.
"""
