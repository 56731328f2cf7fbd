"""One model on the devices of several processes: the leader decides what is computed, and the followers
repeat each of its calls.
"""
