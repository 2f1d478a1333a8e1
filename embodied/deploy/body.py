"""The robot proper, as its process sees it, and the limits that it keeps whoever commands it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from embodied.deploy.wire import Reason
from embodied.spec.robot import ArmSpec
from embodied.spec.rotations import quat_conjugate, quat_multiply, quat_to_rotvec

SLACK = 1.05  # of the velocity limit: the runner's clock and the robot's tick apart


class Body(Protocol):
    """A robot proper. Arrays are float, one-dimensional; poses in the base frame, quaternions wxyz."""

    spec: ArmSpec
    layout: Mapping[str, int]
    """Readings that it gives, by name, with their sizes: `target_pos`, `target_quat` (what it keeps) among them."""
    dt: float
    """Seconds between calls of `step`."""

    def read(self) -> dict[str, Any]:
        """Present readings."""
        ...

    def follow(self, pos: Any, quat: Any) -> None:
        """Take a new target pose."""
        ...

    def hold(self) -> None:
        """Keep the present target."""
        ...

    def step(self) -> str:
        """Advance by `dt`; returns what broke, empty if nothing did."""
        ...

    def scene(self, seed: int) -> None:
        """Prepare an episode's start; BadInput where a person has to do that."""
        ...

    def truth(self) -> dict[str, Any]:
        """What an instrument outside the robot would say of the episode; empty if there is none."""
        ...


def refusal(spec: ArmSpec, pos: Any, quat: Any, before: Any, elapsed: float) -> tuple[Reason, str]:
    """Why a robot refuses a target, Reason.NONE if it does not: finite, inside the workspace, no faster than allowed.

    Args:
        spec: the robot.
        pos: target position [3] m.
        quat: target orientation [4] wxyz.
        before: (position, orientation) of the target it keeps now.
        elapsed: seconds since it took that.
    """
    if not (np.isfinite(pos).all() and np.isfinite(quat).all() and abs(np.linalg.norm(quat) - 1.0) < 1e-3):
        return Reason.NOT_FINITE, f"target {pos}, {quat}"
    for name, at, (low, high) in zip("xyz", pos, spec.workspace, strict=True):
        if not low - 1e-6 <= at <= high + 1e-6:
            return Reason.LIMIT, f"{name} {at:.4f} m, workspace {low} to {high}"
    step = np.abs(pos - before[0]).max() / elapsed
    turn = quat_to_rotvec(quat_multiply(quat, quat_conjugate(np.asarray(before[1], float))))
    twist = np.abs(turn).max() / elapsed
    if step > SLACK * spec.motion.velocity[0] or twist > SLACK * spec.motion.velocity[1]:
        return Reason.LIMIT, f"{step:.3f} m/s and {twist:.3f} rad/s, limits {spec.motion.velocity}"
    return Reason.NONE, ""


def jumps(spec: ArmSpec, pos: Any, quat: Any, before: Any) -> bool:
    """Whether a finite target is farther from the one that is kept than a tick from rest can take it; as `refusal`."""
    step = np.abs(pos - before[0]).max()
    twist = np.abs(quat_to_rotvec(quat_multiply(quat, quat_conjugate(np.asarray(before[1], float))))).max()
    rates = zip(spec.motion.velocity, spec.motion.acceleration, strict=True)
    near = [min(velocity * spec.control_dt, acceleration * spec.control_dt**2) for velocity, acceleration in rates]
    return bool(step > SLACK * near[0] or twist > SLACK * near[1])


def joint_outside(spec: ArmSpec, positions: Any) -> str:
    """The first joint outside its limits, in words; empty if none is."""
    for joint, at in zip(spec.joints, positions, strict=True):
        if not joint.lower <= at <= joint.upper:
            return f"{joint.name} at {at:.3f} rad, limits {joint.lower} to {joint.upper}"
    return ""
