"""The commands that change what a running server does for everybody."""
