"""How the front listens, lives and ends, in one process or several."""
