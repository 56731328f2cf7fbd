"""A thin Python client."""
