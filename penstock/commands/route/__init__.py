"""`penstock route`: its flags. Goes out: a router's options; it never knows a server's models."""
