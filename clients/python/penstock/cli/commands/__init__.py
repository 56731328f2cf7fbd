"""One module for each command that calls a server."""
