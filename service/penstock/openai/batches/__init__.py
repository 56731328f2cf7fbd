"""Many requests in one file: how their lines are read, run, stored and answered."""
