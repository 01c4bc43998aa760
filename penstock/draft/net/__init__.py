"""Models that draft within a step: another checkpoint, the target without some layers, or heads on its hidden states.

Tensors in, logits out. The runner owns their memory, which lies in the target's block pool, and draws the tokens.
"""
