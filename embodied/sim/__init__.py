"""Worlds: engines, environment, resets, samplers, robots, tasks."""
