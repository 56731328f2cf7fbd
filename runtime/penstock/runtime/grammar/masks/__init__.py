"""Fills the masks of all rows of a step, and puts off the rows whose mask takes too long."""
