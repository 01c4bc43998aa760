"""`penstock chat`: a conversation at the terminal."""
