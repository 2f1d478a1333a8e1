"""Errors that are written for people."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BadInput(Exception):
    """What the user asked for cannot be done: one line saying what, what was expected, how to mend it.

    The command line prints it and exits with 2, before any work.
    """


class Fault(Exception):
    """Something went wrong during work: one line for the user; the command line exits with 1."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint naming the valid name nearest to `name`, or all of them if none is near."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(valid)}"
