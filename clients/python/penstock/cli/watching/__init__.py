"""The parts of `penstock top`."""
