"""`penstock top`: what a server does now, in a terminal."""
