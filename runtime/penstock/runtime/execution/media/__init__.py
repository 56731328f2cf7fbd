"""Pictures on the device: the program that encodes them, and what a step's buffer says of them."""
