"""What a policy sees and commands: the description that simulator, export and robot share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from embodied.spec.errors import BadInput, nearest
from embodied.spec.robot import ImpedanceSpec, JointSpec, RobotSpec

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

    @property
    def size(self) -> int:
        """Numbers that the term contributes."""
        return TERM_SIZES[self.kind]


@dataclass(frozen=True)
class ActionSpec:
    """An increment of the tool's target pose in `frame`, a control step: action 1 is `translation` [m], `rotation` [rad]."""

    frame: str
    translation: float
    rotation: float

    size: int = 6


@dataclass(frozen=True)
class PolicySpec:
    """A policy's whole interface. Quaternions are wxyz; frames are poses in the readings."""

    task: str
    robot: RobotSpec
    terms: tuple[Term, ...]
    action: ActionSpec
    quaternion: str = "wxyz"
    version: int = 1

    @property
    def obs_size(self) -> int:
        """Length D of the observation vector."""
        return sum(term.size for term in self.terms)

    @property
    def frames(self) -> tuple[str, ...]:
        """Frames other than `base` that the readings must give as `<frame>_pos` and `<frame>_quat`."""
        used = [f for t in self.terms for f in (t.of, t.frame)] + [self.action.frame]
        return tuple(sorted({frame for frame in used if frame != "base"}))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, lossless through JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PolicySpec:
        """The inverse of `to_dict`, also after a trip through JSON."""
        robot = dict(data["robot"])
        robot["joints"] = tuple(JointSpec(**joint) for joint in robot["joints"])
        robot["impedance"] = ImpedanceSpec(**{key: tuple(value) for key, value in robot["impedance"].items()})
        robot["workspace"] = tuple(tuple(axis) for axis in robot["workspace"])
        rest = {**data, "robot": RobotSpec(**robot), "action": ActionSpec(**data["action"])}
        rest["terms"] = tuple(Term(**term) for term in data["terms"])
        return cls(**rest)
