"""Robots: what physics needs of them beside their specification."""

from __future__ import annotations

from typing import Any

from embodied.spec.errors import BadInput


def check_kind(task: str, robot: Any, kind: type, example: str) -> None:
    """Refuse a robot that a task cannot be done with.

    Raises:
        BadInput: `robot` is not of that kind.
    """
    if not isinstance(robot, kind):
        raise BadInput(
            f"task={task} with robot={robot.spec.name}: expected a robot of the kind '{kind.__name__}', as robot={example}"
        )
