"""One module for each command of `penstock`."""
