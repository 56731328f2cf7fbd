"""What the commands that call a server share: their flags, their messages and their output."""
