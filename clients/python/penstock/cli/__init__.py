"""The command line: the program `penstock`, and its commands that call a server."""
