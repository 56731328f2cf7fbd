"""Bounds what may go on at once, and says when to come back."""
