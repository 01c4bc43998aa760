"""Where drafts come from: tokens that the next step verifies beyond the one it computes anyway.

A row's tokens so far come in, tokens that may follow go out, each with the chance that it is right. Drafters decide how
fast an answer comes, never what it says, and know nothing of the scheduler, which decides how many tokens to verify.
"""
