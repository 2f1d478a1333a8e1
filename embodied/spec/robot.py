"""What a robot is, apart from any simulator: names, limits, gains, rates."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class JointSpec:
    """One joint, by name. Limits of position [rad], velocity [rad/s], acceleration [rad/s^2], jerk [rad/s^3], torque [N m]."""

    name: str
    lower: float
    upper: float
    velocity: float
    acceleration: float
    jerk: float
    effort: float
    home: float


@dataclass(frozen=True)
class ImpedanceSpec:
    """Cartesian impedance of the tool: what the controller on the robot, or in the engine, runs at its own rate.

    Stiffness [N/m, N m/rad], damping [N s/m, N m s/rad], largest force and torque [N, N m], joint damping that keeps the
    null space calm [N m s/rad], leash: the farthest that a target may run ahead of the measured pose [m, rad].
    """

    stiffness: tuple[float, float]
    damping: tuple[float, float]
    limit: tuple[float, float]
    null_damping: tuple[float, ...]
    leash: tuple[float, float]


@dataclass(frozen=True)
class MotionSpec:
    """What may be asked of the tool, whoever asks: bounds of the commanded pose, each axis of the base frame.

    Pairs are (translation, rotation): velocity [m/s, rad/s], acceleration [m/s^2, rad/s^2], jerk [m/s^3, rad/s^3], taken of
    successive commands; wrench [N, N m] is the length of the measured force and torque beyond which motion stops when it has
    lasted for `press_s` [s]: an impact is over in milliseconds, whoever is pressed is pressed for longer.
    """

    velocity: tuple[float, float]
    acceleration: tuple[float, float]
    jerk: tuple[float, float]
    wrench: tuple[float, float]
    press_s: float


@dataclass(frozen=True)
class RobotSpec:
    """A robot with its tool: joints in order, tool frame, Cartesian impedance, rates, what it does when the policy fails."""

    name: str
    joints: tuple[JointSpec, ...]
    tcp: str
    impedance: ImpedanceSpec
    motion: MotionSpec
    workspace: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
    physics_dt: float
    control_dt: float
    fallback: str

    @property
    def joint_names(self) -> tuple[str, ...]:
        """Joint names in the order of every joint vector."""
        return tuple(joint.name for joint in self.joints)

    @property
    def home(self) -> tuple[float, ...]:
        """The rest pose [rad]."""
        return tuple(joint.home for joint in self.joints)

    @property
    def substeps(self) -> int:
        """Physics steps in a control step."""
        return round(self.control_dt / self.physics_dt)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RobotSpec:
        """The inverse of `dataclasses.asdict`, also after a trip through JSON."""
        parts: dict[str, Any] = {
            "joints": tuple(JointSpec(**joint) for joint in data["joints"]),
            "impedance": _tuples(ImpedanceSpec, data["impedance"]),
            "motion": _tuples(MotionSpec, data["motion"]),
            "workspace": tuple(tuple(axis) for axis in data["workspace"]),
        }
        return cls(**{**data, **parts})


def _tuples(cls: type, data: dict[str, Any]) -> Any:
    """An instance of a dataclass of numbers and tuples, of which JSON has made lists."""
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


def digest(spec: Any) -> str:
    """A short hash of a specification's content, equal on every machine."""
    return hashlib.sha256(json.dumps(asdict(spec), sort_keys=True).encode()).hexdigest()[:16]
