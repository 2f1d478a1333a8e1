"""What a policy sees and commands: the description that simulator, export and robot share."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from embodied.spec.errors import BadInput, nearest
from embodied.spec.robot import RobotSpec

PER_JOINT = 0
TERM_SIZES = {
    "position": 3,
    "rotation": 3,
    "linear_velocity": 3,
    "angular_velocity": 3,
    "force": 3,
    "torque": 3,
    "target_position": 3,
    "target_rotation": 3,
    "last_action": 6,
    "joint_position": PER_JOINT,
    "joint_velocity": PER_JOINT,
}
"""Kinds of observation terms and their sizes; `embodied.spec.observe` says what each computes."""


@dataclass(frozen=True)
class Term:
    """One observation term: a `kind` of quantity of the frame `of`, expressed in the frame `frame`, divided by `scale`.

    `clip` (in units of the scaled value) bounds it.
    """

    name: str
    kind: str
    unit: str
    scale: float
    of: str = "tcp"
    frame: str = "base"
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in TERM_SIZES:
            raise BadInput(f"term '{self.name}': unknown kind '{self.kind}': {nearest(self.kind, TERM_SIZES)}")


@dataclass(frozen=True)
class ActionSpec:
    """An increment of the tool's target pose in `frame`, a control step: action 1 is `translation` [m], `rotation` [rad]."""

    frame: str
    translation: float
    rotation: float

    size: int = 6


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
    """A policy's whole interface. Quaternions are wxyz; frames are poses in the readings; `episode_s` is its time limit [s]."""

    task: str
    robot: RobotSpec
    terms: tuple[Term, ...]
    action: ActionSpec
    success: SuccessSpec
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
        return tuple(TERM_SIZES[term.kind] or len(self.robot.joints) for term in self.terms)

    @cached_property
    def scaling(self) -> tuple[list[float], list[float]]:
        """1 / scale of each number of the observation, and its bound after scaling (infinite where a term has none)."""
        terms = [term for term, size in zip(self.terms, self.sizes, strict=True) for _ in range(size)]
        return [1.0 / term.scale for term in terms], [math.inf if term.clip is None else term.clip for term in terms]

    @property
    def max_steps(self) -> int:
        """Control steps in an episode."""
        return round(self.episode_s / self.robot.control_dt)

    @property
    def frames(self) -> tuple[str, ...]:
        """Frames other than `base` that the readings must give as `<frame>_pos` and `<frame>_quat`."""
        used = [f for t in self.terms for f in (t.of, t.frame)] + [self.action.frame, self.success.of, self.success.frame]
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
            "action": ActionSpec(**data["action"]),
            "success": SuccessSpec(**data["success"]),
        }
        return cls(**{**data, **parts})
