"""How the leader of a group and its followers reach each other, over one gRPC stream for each follower."""
