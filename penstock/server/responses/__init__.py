"""OpenAI's responses, translated.

In: bodies of /v1/responses. Out: responses and their events in OpenAI's shapes, and those kept for a while. What is
asked becomes a chat body and is answered like any other; nothing here knows how text is made.
"""
