"""Tasks, each in its own file."""
