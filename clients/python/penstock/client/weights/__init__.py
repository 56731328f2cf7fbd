"""How tensors get from arrays or files into a weight update, and the update to the server."""
