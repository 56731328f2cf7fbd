"""The addresses that a server listens on, with their certificates and connections."""
