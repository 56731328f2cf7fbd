"""What is told to those who watch a server's load."""
