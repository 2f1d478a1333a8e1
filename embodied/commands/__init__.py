"""What the command line's commands do: each composes worlds, brains, learning and looking."""
