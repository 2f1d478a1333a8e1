"""Checks of a task's options, before anything is built of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from embodied.spec.errors import BadInput

LONGEST_S = 3600.0  # an episode that lasts longer is a mistake


def check_options(options: Any, rules: Iterable[tuple[str, bool, str]]) -> None:
    """Refuse the first of `rules` that is not kept: dotted name of an option, whether it is good, what is expected.

    Raises:
        BadInput: see there.
    """
    for name, good, expected in rules:
        if not good:
            raise BadInput(f"task.{name}={attrgetter(name)(options)}: expected {expected}")


def check_episode(name: str, seconds: float, least: float) -> None:
    """Refuse a length of episodes below `least` or above `LONGEST_S` [s].

    Raises:
        BadInput: see there.
    """
    if not least <= seconds <= LONGEST_S:
        raise BadInput(f"task.{name}={seconds}: expected {least:g} to {LONGEST_S:g} s")


def check_range(name: str, low_high: Sequence[float], above: float = 0.0) -> None:
    """Refuse what is not [low, high] with `above` < low <= high < infinity.

    Raises:
        BadInput: see there.
    """
    if len(low_high) != 2 or not above < low_high[0] <= low_high[1] < math.inf:
        raise BadInput(f"task.{name}={list(low_high)}: expected [low, high] with {above:g} < low <= high")
