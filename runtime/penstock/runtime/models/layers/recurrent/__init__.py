"""The layers that stand in the place of attention and keep state by slot."""
