"""From the bodies of requests to the arguments of the client."""
