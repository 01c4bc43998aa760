"""`penstock route`: a router in front of several servers.

Comes in: requests of OpenAI's API and of the other dialects. Goes out: the same to one of the upstream servers, and its
answer back. It never knows models, tokenizers or engines: only URLs, bytes, and the tokens that our servers mark.
"""
