"""Reality: from a trained policy to a robot."""
