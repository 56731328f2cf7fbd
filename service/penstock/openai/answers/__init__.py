"""From values of the client to the bodies and chunks of replies."""
