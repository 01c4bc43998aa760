"""OpenAI's Responses API, translated.

In: bodies of /v1/responses. Out: responses and events in OpenAI's format, some of them stored. A body becomes a chat
body; nothing here generates.
"""
