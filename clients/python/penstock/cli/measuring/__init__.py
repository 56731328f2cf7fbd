"""The load and the arithmetic of `penstock bench`."""
