"""`embodied deploy check`: does an exported policy fit a robot, name by name."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from omegaconf import MISSING

from embodied.arguments import read
from embodied.commands.deploy.connect import load_policy, mismatches
from embodied.deploy.link import DEFAULT, connect
from embodied.spec.errors import BadInput


@dataclass
class CheckOptions:
    """Options of `embodied deploy check`."""

    policy: str = MISSING  # an exported file, or the folder of a run that was exported
    robot: str = DEFAULT
    key_file: str | None = None


def run(words: list[str]) -> int:
    """Recompute the golden cases and compare the specifications."""
    options = read("deploy check", CheckOptions, words)
    policy = load_policy(options.policy)
    policy.check_golden()
    print(f"{options.policy}: {len(policy.metadata['golden'])} golden cases recomputed, from readings to commands")
    with contextlib.closing(connect(options.robot, options.key_file)) as link:
        found = mismatches(policy, link, link.hello())
    for line in found:
        print(f"  {line}")
    if found:
        raise BadInput(f"{options.policy} does not fit the robot at {options.robot}: {len(found)} differences, listed above")
    print(f"fits {policy.spec.robot.name} at {options.robot}: joints, limits, gains, rates, readings and commands agree")
    return 0
