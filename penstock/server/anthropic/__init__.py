"""Anthropic's Messages API, translated.

In: bodies of /v1/messages and /v1/messages/count_tokens. Out: messages, events and errors in Anthropic's format. A body
becomes a chat body; nothing here generates.
"""
