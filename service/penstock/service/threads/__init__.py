"""Work that blocks runs here, beside the event loop."""
