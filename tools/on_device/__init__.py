"""Tries the engine on a machine that is lent for a short time, such as one with a GPU and without a
network.
"""
