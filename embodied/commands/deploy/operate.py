"""`embodied deploy stop` and `clear`: the operator's emergency stop, which the robot latches."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from embodied.arguments import read
from embodied.deploy.link import DEFAULT, connect


@dataclass
class OperateOptions:
    """Options of `embodied deploy stop` and `embodied deploy clear`."""

    robot: str = DEFAULT
    key_file: str | None = None


def stop(words: list[str]) -> int:
    """Stop the robot, whoever holds it, and latch that."""
    return _ask("estop", "deploy stop", words, "stopped and latched; `embodied deploy clear` lets it move again")


def clear(words: list[str]) -> int:
    """Let a robot move again after an emergency stop; whoever held it has to start over."""
    return _ask("clear", "deploy clear", words, "cleared: the robot will obey the next runner")


def _ask(verb: str, command: str, words: list[str], said: str) -> int:
    options = read(command, OperateOptions, words)
    with contextlib.closing(connect(options.robot, options.key_file)) as link:
        link.request(verb, reason="operator")
    print(said)
    return 0
