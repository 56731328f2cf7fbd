"""What can be wanted of a prompt after which nothing is generated."""
