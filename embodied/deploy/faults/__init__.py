"""Faults between a runner and a simulated robot, injected and measured at the robot."""
