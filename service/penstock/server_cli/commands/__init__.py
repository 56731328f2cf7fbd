"""One module for each of these commands."""
