"""What the tokens of a plan mean for its sequences, and how sequences end."""
