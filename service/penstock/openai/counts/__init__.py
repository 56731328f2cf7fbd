"""What a worker counts: its requests, the bodies on their way in, and metrics."""
