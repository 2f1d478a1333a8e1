"""Robots, as data."""
