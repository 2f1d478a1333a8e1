"""The one function that computes observations and the one that turns actions into commands, in simulation and on the robot.

Both are pure and batched: N worlds (a robot is a batch of one), torch tensors or numpy arrays.

`readings`, by name: `<frame>_pos` [N, 3] m and `<frame>_quat` [N, 4] wxyz for every frame of the spec, in the robot's base
frame; `tcp_linvel` [N, 3] m/s and `tcp_angvel` [N, 3] rad/s in the base frame; `force` [N, 3] N and `torque` [N, 3] N m at
the wrist sensor, in the tcp's orientation, exerted by the environment on the tool; `joint_pos` [N, J] rad and `joint_vel`
[N, J] rad/s in the order of the spec's joints; `gyro` [N, 3] rad/s, the body's angular velocity in its own frame; `request`
[N, K], what is asked of the robot, and `heights` [N, K] m: each where a term asks for it. What moves about gives its body's
frame in place of the tool's, in a base frame that is fixed to the ground.

`memory`: `last_action` [N, A] and what the action commands: `target_pos` [N, 3] and `target_quat` [N, 4] (base frame),
`target_joints` [N, J] rad, or `rotor_speeds` [N, R] rpm; where a term sees them, `past_actions` [N, H A], the last one first,
and `time` [N, 1] s since the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast

from embodied.spec.policy import JointTargets, PolicySpec, SuccessSpec, Term, ToolMotion
from embodied.spec.robot import ArmSpec, RotorcraftSpec
from embodied.spec.rotations import (
    Array,
    clamp,
    like,
    namespace,
    normalise,
    quat_conjugate,
    quat_multiply,
    quat_to_matrix,
    quat_to_rotvec,
    rotate,
    rotate_inverse,
    rotvec_to_quat,
    zeros,
)

Readings = Mapping[str, Array]
Memory = dict[str, Array]


def start_memory(spec: PolicySpec, readings: Readings) -> Memory:
    """The memory at an episode's beginning: a target where the robot is, and nothing commanded."""
    some = next(iter(readings.values()))
    xp, action = namespace(some), spec.action
    if isinstance(action, ToolMotion):
        memory = {"target_pos": readings["tcp_pos"], "target_quat": readings["tcp_quat"]}
    elif isinstance(action, JointTargets):
        memory = {"target_joints": xp.zeros_like(readings["joint_pos"]) + like(spec.robot.home, some)}
    else:
        memory = {}
    memory["last_action"] = zeros(some, action.size)
    if spec.clock:
        memory["time"] = zeros(some, 1)
    if spec.history:
        memory["past_actions"] = zeros(some, spec.history * action.size)
    return memory


def observe(spec: PolicySpec, readings: Readings, memory: Memory) -> Array:
    """The policy's observation [N, D], terms in the spec's order."""
    some = next(iter(readings.values()))
    xp = namespace(some)
    values: list[Array] = [None] * len(spec.terms)
    turned: dict[str, list[int]] = {}
    for i, term in enumerate(spec.terms):
        values[i] = _TERMS[term.kind](term, readings, memory)
        if term.kind == "joint_position":
            values[i] = values[i] - like(spec.robot.home, values[i])
        if term.frame != "base" and term.kind not in _IN_ITS_FRAME:
            turned.setdefault(term.frame, []).append(i)
    for frame, indices in turned.items():
        # all vectors that are seen from one frame are turned at once: [N, K, 3]
        vectors = rotate_inverse(readings[f"{frame}_quat"][..., None, :], xp.stack([values[i] for i in indices], -2))
        for k, i in enumerate(indices):
            values[i] = vectors[..., k, :]
    inverse_scale, bound = spec.scaling
    seen = xp.concatenate(values, -1) * like(inverse_scale, some)
    return seen if bound is None else clamp(seen, like(-bound, some), like(bound, some))


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
    """The memory after `action` [N, A] in [-1, 1]; what it commands is in it, see above."""
    action = clamp(action, -1.0, 1.0)
    kind = spec.action
    if isinstance(kind, ToolMotion):
        commanded = _move_tool(spec, kind, action, readings, memory)
    elif isinstance(kind, JointTargets):
        commanded = {"target_joints": like(spec.robot.home, action) + action * like(kind.scale, action)}
    else:
        low, high = cast(RotorcraftSpec, spec.robot).rpm
        commanded = {"rotor_speeds": (low + high) / 2 + (high - low) / 2 * action}
    commanded["last_action"] = action
    if spec.clock:
        commanded["time"] = memory["time"] + spec.robot.control_dt
    if spec.history:
        past = memory["past_actions"]
        commanded["past_actions"] = namespace(past).concatenate([action, past[..., : -kind.size]], -1)
    return commanded


def _move_tool(spec: PolicySpec, kind: ToolMotion, action: Array, readings: Readings, memory: Memory) -> Memory:
    """The tool's target, moved by the action in the spec's action frame and leashed to the measured pose.

    Bounded tracking error times stiffness is bounded contact force (the policy-level action integrator of IndustReal, arXiv
    2305.17110). The target stays inside the robot's workspace.
    """
    robot = cast(ArmSpec, spec.robot)
    frame = _orientation(kind.frame, readings)
    leash = robot.impedance.leash
    move = action[..., :3] * kind.translation
    turn = action[..., 3:] * kind.rotation
    if frame is not None:
        move, turn = rotate(frame, move), rotate(frame, turn)
    lead = memory["target_pos"] + move - readings["tcp_pos"]
    wanted = quat_multiply(rotvec_to_quat(turn), memory["target_quat"])
    twist = quat_to_rotvec(quat_multiply(wanted, quat_conjugate(readings["tcp_quat"])))
    pos = readings["tcp_pos"] + _shorten(lead, leash[0])
    lower, upper = zip(*robot.workspace, strict=True)
    pos = clamp(pos, like(lower, pos), like(upper, pos))
    return {
        "target_pos": pos,
        "target_quat": normalise(quat_multiply(rotvec_to_quat(_shorten(twist, leash[1])), readings["tcp_quat"])),
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


def _rotation_matrix(term: Term, readings: Readings, memory: Memory) -> Array:
    """Axes of `of` in `frame`, as the columns of a matrix, row by row [9]."""
    quat, base = readings[f"{term.of}_quat"], _orientation(term.frame, readings)
    return quat_to_matrix(quat if base is None else quat_multiply(quat_conjugate(base), quat))


def _gyro(term: Term, readings: Readings, memory: Memory) -> Array:
    """Angular velocity of the body in its own frame, as a gyroscope gives it [rad/s]."""
    return readings["gyro"]


def _gravity(term: Term, readings: Readings, memory: Memory) -> Array:
    """Where down is, in the frame `of`: the base frame's -z [1]."""
    quat = readings[f"{term.of}_quat"]
    w, x, y, z = quat[..., 0], quat[..., 1], quat[..., 2], quat[..., 3]
    return namespace(quat).stack([2.0 * (w * y - x * z), -2.0 * (w * x + y * z), 2.0 * (x * x + y * y) - 1.0], -1)


def _request(term: Term, readings: Readings, memory: Memory) -> Array:
    """What is asked of the robot, in the units of the task."""
    return readings["request"]


def _heights(term: Term, readings: Readings, memory: Memory) -> Array:
    """Ground beneath the points of a scan, from the height of `of` [m]."""
    return readings["heights"]


def _clock(term: Term, readings: Readings, memory: Memory) -> Array:
    """Sine and cosine of where the time is in the period `scale` [s]."""
    xp, turn = namespace(memory["time"]), memory["time"] * (2.0 * math.pi / term.scale)
    return xp.concatenate([xp.sin(turn), xp.cos(turn)], -1)


def _past_actions(term: Term, readings: Readings, memory: Memory) -> Array:
    """The last actions, the last one first."""
    return memory["past_actions"]


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
    "rotation_matrix": _rotation_matrix,
    "gyro": _gyro,
    "gravity": _gravity,
    "request": _request,
    "heights": _heights,
    "past_actions": _past_actions,
    "clock": _clock,
}
# the other kinds that take a frame are computed in the base frame, then turned into the term's
_IN_ITS_FRAME = ("rotation", "rotation_matrix")
