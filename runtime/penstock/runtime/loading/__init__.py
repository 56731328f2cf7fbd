"""From a checkpoint, a hub id or the built-in demo model to weights on the device."""
