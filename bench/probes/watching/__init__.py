"""What watching a server costs."""
