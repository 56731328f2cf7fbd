"""The commands of `penstock` that run on the server's machine and need the engine."""
