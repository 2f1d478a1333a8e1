"""What a runner may do next: modes, the transitions between them, and the epoch that each transition raises."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Mode(StrEnum):
    """What the runner does."""

    DISCONNECTED = "disconnected"
    PREFLIGHT = "preflight"  # compares specifications, recomputes the golden cases
    IDLE = "idle"  # holds the robot, commands nothing
    ALIGN = "align"  # brings the target to where the tool is
    AUTO = "auto"  # the policy commands, through the guard
    HOLD = "hold"  # something is late or wrong: at rest, for a while
    END = "end"  # comes to rest at an episode's end
    FAULT = "fault"  # the run is over
    ESTOP = "estop"  # latched in the robot


_ALLOWED = {
    Mode.DISCONNECTED: {Mode.PREFLIGHT},
    Mode.PREFLIGHT: {Mode.IDLE},
    Mode.IDLE: {Mode.ALIGN, Mode.DISCONNECTED},
    Mode.ALIGN: {Mode.AUTO, Mode.END},
    Mode.AUTO: {Mode.HOLD, Mode.END},
    Mode.HOLD: {Mode.AUTO, Mode.END},
    Mode.END: {Mode.IDLE},
    Mode.FAULT: {Mode.DISCONNECTED},
    Mode.ESTOP: {Mode.DISCONNECTED},
}
"""From each mode; beside these FAULT, ESTOP and DISCONNECTED can be reached from anywhere but themselves."""


class Machine:
    """The present mode. Commands carry the epoch: what was meant for an earlier one is never acted on.

    Args:
        note: called with (from, to, reason, epoch) after each transition.
    """

    def __init__(self, note: Callable[[Mode, Mode, str, int], None]) -> None:
        self.mode, self.epoch = Mode.DISCONNECTED, 1
        self._note = note

    def renew(self) -> None:
        """Raise the epoch without a transition: the robot has stopped by itself and refuses what comes of the present one."""
        self.epoch += 1

    def to(self, mode: Mode, reason: str = "") -> None:
        """Change to `mode`.

        Raises:
            ValueError: that cannot follow the present mode.
        """
        ending = self.mode in (Mode.FAULT, Mode.ESTOP)
        anywhere = mode == Mode.DISCONNECTED or (mode in (Mode.FAULT, Mode.ESTOP) and not ending)
        if mode == self.mode or not (anywhere or mode in _ALLOWED[self.mode]):
            raise ValueError(f"{mode} cannot follow {self.mode}")
        before, self.mode, self.epoch = self.mode, mode, self.epoch + 1
        self._note(before, mode, reason, self.epoch)
