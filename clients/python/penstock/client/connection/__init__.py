"""How a client reaches its server: the address, TLS, the channel, retries and time limits."""
