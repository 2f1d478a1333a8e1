"""Whether the numbers of one policy mean what those of another do: what recorded data must have in common with a task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from embodied.spec.policy import PER_JOINT, TERM_SIZES, JointTargets, PolicySpec, RotorSpeeds
from embodied.spec.robot import RobotSpec, RotorcraftSpec

OF_THE_TASK = ("request", "heights")
"""Kinds of terms of which only the task can say what they are."""


def difference(theirs: PolicySpec, ours: PolicySpec) -> str | None:
    """The first reason why observations and actions of `theirs` say something else under `ours`, in words; None: none.

    What counts: the rate; the terms in their order, with all that computes them; kind, frame and scales of the action; the
    joints in their order and the pose that they are measured from, where numbers belong to joints; the range of rotor speeds,
    where these are commanded; the task, where terms are its own. What does not: names of terms, success, the time limit, and
    limits, gains and steps of physics of the robot. They change what comes of an action, not what was seen and done: data of
    another plant, or of an arm that takes the same motion of its tool, are good to imitate.
    """
    for what, other, own in _differences(theirs, ours):
        return f"{what} is {other}, the task's is {own}"
    return None


def _differences(theirs: PolicySpec, ours: PolicySpec) -> Iterator[tuple[str, Any, Any]]:
    pairs = [
        ("the specification's version", theirs.version, ours.version),
        ("the order of quaternions", theirs.quaternion, ours.quaternion),
        ("the time between actions [s]", theirs.robot.control_dt, ours.robot.control_dt),
        *_terms(theirs, ours),
        *_action(theirs, ours),
    ]
    kinds = {term.kind for term in ours.terms}
    if isinstance(ours.action, JointTargets) or any(TERM_SIZES[kind] == PER_JOINT for kind in kinds):
        pairs += [
            ("the order of joints", theirs.robot.joint_names, ours.robot.joint_names),
            ("the rest pose [rad]", theirs.robot.home, ours.robot.home),
        ]
    if isinstance(ours.action, RotorSpeeds):
        pairs.append(("the range of rotor speeds [rpm]", _rpm(theirs.robot), _rpm(ours.robot)))
    if kinds.intersection(OF_THE_TASK):
        pairs.append(("the task", theirs.task, ours.task))
    return (pair for pair in pairs if pair[1] != pair[2])


def _terms(theirs: PolicySpec, ours: PolicySpec) -> Iterator[tuple[str, Any, Any]]:
    for number, (other, own) in enumerate(zip_longest(theirs.terms, ours.terms)):
        if other is None or own is None:
            yield f"the number of observation terms, from '{(other or own).name}' on,", len(theirs.terms), len(ours.terms)
            return
        for option in fields(own):
            if option.name != "name":
                what = f"{option.name} of observation term {number}, '{own.name}',"
                yield what, getattr(other, option.name), getattr(own, option.name)


def _action(theirs: PolicySpec, ours: PolicySpec) -> Iterator[tuple[str, Any, Any]]:
    yield "the kind of action", theirs.action.kind, ours.action.kind
    for option in fields(ours.action):
        yield f"{option.name} of the action", getattr(theirs.action, option.name, None), getattr(ours.action, option.name)


def _rpm(robot: RobotSpec) -> Any:
    return robot.rpm if isinstance(robot, RotorcraftSpec) else None
