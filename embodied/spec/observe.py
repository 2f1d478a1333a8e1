"""The one function that computes observations and the one that turns actions into commands, in simulation and on the robot.

Both are pure and batched: N worlds (a robot is a batch of one), torch tensors or numpy arrays.

`readings`, by name: `<frame>_pos` [N, 3] m and `<frame>_quat` [N, 4] wxyz for every frame of the spec, in the robot's base
frame; `tcp_linvel` [N, 3] m/s and `tcp_angvel` [N, 3] rad/s in the base frame; `force` [N, 3] N and `torque` [N, 3] N m at
the wrist sensor, in the tcp's orientation, exerted by the environment on the tool; `joint_pos` [N, J] rad and `joint_vel`
[N, J] rad/s in the order of the spec's joints, where a term asks for them.

`memory`: `target_pos` [N, 3], `target_quat` [N, 4] (base frame), `last_action` [N, 6].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from embodied.spec.policy import PolicySpec, SuccessSpec, Term
from embodied.spec.rotations import (
    Array,
    clamp,
    like,
    namespace,
    normalise,
    quat_conjugate,
    quat_multiply,
    quat_to_rotvec,
    rotate,
    rotate_inverse,
    rotvec_to_quat,
)

Readings = Mapping[str, Array]
Memory = dict[str, Array]


def start_memory(spec: PolicySpec, readings: Readings) -> Memory:
    """The memory at an episode's beginning: the target is where the tool is, nothing has been commanded."""
    xp = namespace(readings["tcp_pos"])
    pos, quat = readings["tcp_pos"], readings["tcp_quat"]
    zeros = xp.zeros_like(pos)
    return {"target_pos": pos, "target_quat": quat, "last_action": xp.concatenate([zeros, zeros], -1)}


def observe(spec: PolicySpec, readings: Readings, memory: Memory) -> Array:
    """The policy's observation [N, D], terms in the spec's order."""
    xp = namespace(readings["tcp_pos"])
    values: list[Array] = [None] * len(spec.terms)
    turned: dict[str, list[int]] = {}
    for i, term in enumerate(spec.terms):
        values[i] = _TERMS[term.kind](term, readings, memory)
        if term.kind == "joint_position":
            values[i] = values[i] - like(spec.robot.home, values[i])
        if term.frame != "base" and term.kind in _IN_BASE_FRAME:
            turned.setdefault(term.frame, []).append(i)
    for frame, indices in turned.items():
        # all vectors that are seen from one frame are turned at once: [N, K, 3]
        vectors = rotate_inverse(readings[f"{frame}_quat"][..., None, :], xp.stack([values[i] for i in indices], -2))
        for k, i in enumerate(indices):
            values[i] = vectors[..., k, :]
    inverse_scale, bound = (like(x, readings["tcp_pos"]) for x in spec.scaling)
    return clamp(xp.concatenate(values, -1) * inverse_scale, -bound, bound)


def succeeded(success: SuccessSpec, readings: Readings) -> Array:
    """Whether the readings meet the condition of success now, bool [N]; the caller counts the steps in a row."""
    of, frame = success.of, success.frame
    at = rotate_inverse(readings[f"{frame}_quat"], readings[f"{of}_pos"] - readings[f"{frame}_pos"])
    turn = quat_multiply(quat_conjugate(readings[f"{frame}_quat"]), readings[f"{of}_quat"])
    # z component of the tool's z axis in the frame: the cosine of the tilt
    cosine = 1.0 - 2.0 * (turn[..., 1] ** 2 + turn[..., 2] ** 2)
    beside = (abs(at[..., 0]) < success.lateral) & (abs(at[..., 1]) < success.lateral)
    good = (at[..., 2] >= success.depth) & beside & (cosine > math.cos(success.tilt))
    return good if success.turn is None else good & (turn_about_z(turn) >= success.turn)


def turn_about_z(quat: Array) -> Array:
    """The rotation about z, in [-pi, pi], that is left of a rotation [..., 4] when its tilt is taken off [...]."""
    w, z = quat[..., 0], quat[..., 3]
    xp = namespace(quat)
    # q and -q are the same rotation
    return 2.0 * xp.arctan2(xp.where(w < 0, -z, z), abs(w))


def command(spec: PolicySpec, action: Array, readings: Readings, memory: Memory) -> Memory:
    """The memory after `action` [N, 6] in [-1, 1]: its `target_pos` and `target_quat` are the command to the robot.

    The target moves by the action in the spec's action frame and is leashed to the measured pose: bounded tracking error
    times stiffness is bounded contact force (the policy-level action integrator of IndustReal, arXiv 2305.17110). It
    stays inside the robot's workspace.
    """
    action = clamp(action, -1.0, 1.0)
    frame = _orientation(spec.action.frame, readings)
    leash = spec.robot.impedance.leash
    move = action[..., :3] * spec.action.translation
    turn = action[..., 3:] * spec.action.rotation
    if frame is not None:
        move, turn = rotate(frame, move), rotate(frame, turn)
    lead = memory["target_pos"] + move - readings["tcp_pos"]
    wanted = quat_multiply(rotvec_to_quat(turn), memory["target_quat"])
    twist = quat_to_rotvec(quat_multiply(wanted, quat_conjugate(readings["tcp_quat"])))
    pos = readings["tcp_pos"] + _shorten(lead, leash[0])
    lower, upper = zip(*spec.robot.workspace, strict=True)
    pos = clamp(pos, like(lower, pos), like(upper, pos))
    return {
        "target_pos": pos,
        "target_quat": normalise(quat_multiply(rotvec_to_quat(_shorten(twist, leash[1])), readings["tcp_quat"])),
        "last_action": action,
    }


def _shorten(vector: Array, limit: float) -> Array:
    """The vector, shortened to length `limit` where it is longer."""
    length = namespace(vector).sqrt((vector * vector).sum(-1))[..., None]
    return vector * clamp(limit / clamp(length, 1e-9, math.inf), 0.0, 1.0)


def _orientation(frame: str, readings: Readings) -> Array | None:
    return None if frame == "base" else readings[f"{frame}_quat"]


def _position(term: Term, readings: Readings, memory: Memory) -> Array:
    """Position of `of` from the origin of `frame` [m]."""
    pos = readings[f"{term.of}_pos"]
    return pos if term.frame == "base" else pos - readings[f"{term.frame}_pos"]


def _rotation(term: Term, readings: Readings, memory: Memory) -> Array:
    """Rotation vector from `frame` to `of` [rad], expressed in `frame`."""
    quat, base = readings[f"{term.of}_quat"], _orientation(term.frame, readings)
    return quat_to_rotvec(quat if base is None else quat_multiply(quat_conjugate(base), quat))


def _linear_velocity(term: Term, readings: Readings, memory: Memory) -> Array:
    """Velocity of `of`'s origin [m/s]."""
    return readings[f"{term.of}_linvel"]


def _angular_velocity(term: Term, readings: Readings, memory: Memory) -> Array:
    """Angular velocity of `of` [rad/s]."""
    return readings[f"{term.of}_angvel"]


def _force(term: Term, readings: Readings, memory: Memory) -> Array:
    """Force of the environment on the tool [N]."""
    return rotate(readings["tcp_quat"], readings["force"])


def _torque(term: Term, readings: Readings, memory: Memory) -> Array:
    """Torque of the environment on the tool about the wrist [N m]."""
    return rotate(readings["tcp_quat"], readings["torque"])


def _target_position(term: Term, readings: Readings, memory: Memory) -> Array:
    """How far the commanded position is ahead of the measured one [m]."""
    return memory["target_pos"] - readings["tcp_pos"]


def _target_rotation(term: Term, readings: Readings, memory: Memory) -> Array:
    """Rotation vector from the measured orientation to the commanded one [rad]."""
    return quat_to_rotvec(quat_multiply(memory["target_quat"], quat_conjugate(readings["tcp_quat"])))


def _last_action(term: Term, readings: Readings, memory: Memory) -> Array:
    """The action commanded last, as clipped."""
    return memory["last_action"]


def _joint_position(term: Term, readings: Readings, memory: Memory) -> Array:
    """Joint positions from the rest pose [rad]; the rest pose is taken off by `observe`."""
    return readings["joint_pos"]


def _joint_velocity(term: Term, readings: Readings, memory: Memory) -> Array:
    """Joint velocities [rad/s]."""
    return readings["joint_vel"]


_TERMS: dict[str, Callable[[Term, Readings, Memory], Array]] = {
    "position": _position,
    "rotation": _rotation,
    "linear_velocity": _linear_velocity,
    "angular_velocity": _angular_velocity,
    "force": _force,
    "torque": _torque,
    "target_position": _target_position,
    "target_rotation": _target_rotation,
    "last_action": _last_action,
    "joint_position": _joint_position,
    "joint_velocity": _joint_velocity,
}
# computed in the base frame, then turned into the term's
_IN_BASE_FRAME = set(_TERMS) - {"rotation", "last_action", "joint_position", "joint_velocity"}
