"""Data: episodes, and datasets of them in LeRobot's format."""
