"""What the shapes of all robots share."""

from __future__ import annotations

VISUAL = {"contype": 0, "conaffinity": 0, "mass": 0.0}
"""Shapes touch nothing by themselves: tasks name the pairs that can, which spares the broad phase."""
