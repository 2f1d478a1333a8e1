"""What a policy sees and commands: the description that simulator, export and robot share."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.spec.errors import BadInput, nearest
from embodied.spec.robot import ArmSpec, RobotSpec

PER_JOINT, PER_ACTION = 0, -1
TERM_SIZES = {
    "position": 3,
    "rotation": 3,
    "linear_velocity": 3,
    "angular_velocity": 3,
    "force": 3,
    "torque": 3,
    "target_position": 3,
    "target_rotation": 3,
    "last_action": PER_ACTION,
    "joint_position": PER_JOINT,
    "joint_velocity": PER_JOINT,
    "rotation_matrix": 9,
    "gyro": 3,
    "gravity": 3,
    "request": 1,
    "heights": 1,
    "past_actions": PER_ACTION,
    "clock": 2,
}
"""Kinds of observation terms and their sizes; `embodied.spec.observe` says what each computes."""

COUNTED = ("request", "heights", "past_actions")
"""Kinds of which a term has `count`."""

FRAMED = (
    "position",
    "rotation",
    "linear_velocity",
    "angular_velocity",
    "force",
    "torque",
    "target_position",
    "target_rotation",
    "rotation_matrix",
)
"""Kinds that can be expressed in any `frame`."""


@dataclass(frozen=True)
class Term:
    """One observation term: a `kind` of quantity of the frame `of`, expressed in the frame `frame`, divided by `scale`.

    Of a `clock` the scale is its period. `clip` (in units of the scaled value) bounds it; `count` is how many there are: points
    of a scan, steps of a history.
    """

    name: str
    kind: str
    unit: str
    scale: float
    of: str = "tcp"
    frame: str = "base"
    clip: float | None = None
    count: int = 1

    def __post_init__(self) -> None:
        if self.kind not in TERM_SIZES:
            raise BadInput(f"term '{self.name}': unknown kind '{self.kind}': {nearest(self.kind, TERM_SIZES)}")
        if not 0 < self.scale < math.inf:
            raise BadInput(f"term '{self.name}': scale={self.scale}: expected a finite number above 0")
        if self.count < 1:
            raise BadInput(f"term '{self.name}': count={self.count} of '{self.kind}': expected at least 1")
        if self.count > 1 and self.kind not in COUNTED:
            raise BadInput(f"term '{self.name}': count={self.count} of '{self.kind}': only {', '.join(COUNTED)} have one")
        if self.frame != "base" and self.kind not in FRAMED:
            raise BadInput(f"term '{self.name}': frame='{self.frame}': '{self.kind}' is not expressed in a frame; leave it out")


@dataclass(frozen=True)
class ToolMotion:
    """An increment of the tool's target pose in `frame`, a control step: action 1 is `translation` [m], `rotation` [rad]."""

    frame: str
    translation: float
    rotation: float
    size: int = 6
    kind: str = field(default="tool_motion", init=False)


@dataclass(frozen=True)
class JointTargets:
    """Position targets of the joints: the rest pose and, for action 1, `scale` [rad] beyond it, by joint."""

    scale: tuple[float, ...]
    kind: str = field(default="joint_targets", init=False)

    @property
    def size(self) -> int:
        """One number a joint."""
        return len(self.scale)


@dataclass(frozen=True)
class RotorSpeeds:
    """Speeds of the rotors, from the least (action -1) to the most (1) that the robot allows."""

    size: int = 4
    kind: str = field(default="rotor_speeds", init=False)


Action = ToolMotion | JointTargets | RotorSpeeds
_ACTIONS: dict[str, Any] = {"tool_motion": ToolMotion, "joint_targets": JointTargets, "rotor_speeds": RotorSpeeds}


def _action(data: dict[str, Any]) -> Action:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    made: Action = _ACTIONS[str(values.pop("kind"))](**values)
    return made


@dataclass(frozen=True)
class SuccessSpec:
    """When an episode has succeeded, as far as readings can tell: the frame `of` is at least `depth` [m] along the z axis of
    `frame`, no farther than `lateral` [m] beside it, tilted by less than `tilt` [rad], turned about z by at least `turn` [rad]
    (None: however it is turned), for `steps` control steps in a row.
    """

    of: str
    frame: str
    depth: float
    lateral: float
    tilt: float
    steps: int
    turn: float | None = None


@dataclass(frozen=True)
class PolicySpec:
    """A policy's whole interface. Quaternions are wxyz; frames are poses in the readings; `episode_s` is its time limit [s].

    `success` is None where readings cannot tell, or where it is judged over the whole of an episode.
    """

    task: str
    robot: RobotSpec
    terms: tuple[Term, ...]
    action: Action
    success: SuccessSpec | None
    episode_s: float
    quaternion: str = "wxyz"
    version: int = 1

    @property
    def obs_size(self) -> int:
        """Length D of the observation vector."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers that each term contributes."""
        wide = {PER_JOINT: len(self.robot.joints), PER_ACTION: self.action.size}
        return tuple(wide.get(TERM_SIZES[term.kind], TERM_SIZES[term.kind]) * term.count for term in self.terms)

    @property
    def clock(self) -> bool:
        """Whether the policy sees how long it has been running."""
        return any(term.kind == "clock" for term in self.terms)

    @property
    def history(self) -> int:
        """Actions that are remembered, the last included."""
        return max((term.count for term in self.terms if term.kind == "past_actions"), default=0)

    @cached_property
    def scaling(self) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """1 / scale of each number of the observation, and its bound after scaling, infinite where a term has none (None: no
        term has one).
        """
        scale = np.repeat([1.0 if term.kind == "clock" else term.scale for term in self.terms], self.sizes)
        bound = np.repeat([math.inf if term.clip is None else term.clip for term in self.terms], self.sizes)
        return 1.0 / scale, None if np.isinf(bound).all() else bound

    @property
    def max_steps(self) -> int:
        """Control steps in an episode."""
        return round(self.episode_s / self.robot.control_dt)

    @property
    def frames(self) -> tuple[str, ...]:
        """Frames other than `base` that the readings must give as `<frame>_pos` and `<frame>_quat`."""
        used = [f for t in self.terms for f in (t.of, t.frame)]
        if isinstance(self.action, ToolMotion):
            used.append(self.action.frame)
        if self.success is not None:
            used += [self.success.of, self.success.frame]
        return tuple(sorted({frame for frame in used if frame != "base"}))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, lossless through JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PolicySpec:
        """The inverse of `to_dict`, also after a trip through JSON."""
        parts = {
            "robot": RobotSpec.from_dict(data["robot"]),
            "terms": tuple(Term(**term) for term in data["terms"]),
            "action": _action(data["action"]),
            "success": None if data["success"] is None else SuccessSpec(**data["success"]),
        }
        return cls(**{**data, **parts})


def of_arm(spec: PolicySpec) -> tuple[ArmSpec, SuccessSpec]:
    """The robot and the success of a policy that works with an arm, for what serves no other robot.

    Raises:
        BadInput: it is of another robot.
    """
    if not isinstance(spec.robot, ArmSpec) or spec.success is None:
        raise BadInput(
            f"the policy of task '{spec.task}' is for robot '{spec.robot.name}', which is no arm: expected one of an arm"
        )
    return spec.robot, spec.success
