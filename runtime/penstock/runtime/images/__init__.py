"""Images of prompts, from the bytes that a caller sends to the patches that the model's encoder takes."""
