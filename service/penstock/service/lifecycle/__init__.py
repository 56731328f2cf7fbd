"""What a server tells before it has an engine, how it notices that one hangs, and how it ends."""
