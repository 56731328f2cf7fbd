"""Turns a plan of the scheduler into calls of compiled programs on the device."""
