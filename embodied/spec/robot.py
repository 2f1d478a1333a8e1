"""What a robot is, apart from any simulator: names, limits, gains, rates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class JointSpec:
    """One joint, by name. Limits of position [rad], velocity [rad/s], acceleration [rad/s^2], jerk [rad/s^3], torque [N m].

    None: its maker publishes no such limit.
    """

    name: str
    lower: float
    upper: float
    velocity: float
    acceleration: float | None
    jerk: float | None
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
    """What every robot has: joints in order, rates, and what it does when the policy fails."""

    name: str
    joints: tuple[JointSpec, ...]
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

    @staticmethod
    def from_dict(data: dict[str, Any]) -> RobotSpec:
        """The inverse of `dataclasses.asdict` for any robot, also after a trip through JSON.

        Raises:
            KeyError: the kind is unknown, or something is missing.
        """
        values = dict(data)
        parts = {name: build(values[name]) for name, build in _PARTS.items() if name in values}
        return KINDS[values.pop("kind")](**{**values, **parts})


@dataclass(frozen=True)
class ArmSpec(RobotSpec):
    """An arm with its tool: the tool's frame, Cartesian impedance, bounds of its motion, and where it may be [m]."""

    tcp: str
    impedance: ImpedanceSpec
    motion: MotionSpec
    workspace: tuple[tuple[float, float], ...]
    kind: str = field(default="arm", init=False)


@dataclass(frozen=True)
class LeggedSpec(RobotSpec):
    """A robot on legs, whose joints are held at position targets by a controller of its own.

    Attributes:
        stiffness, damping: of that controller, by joint [N m/rad, N m s/rad].
        trunk: the frame of its body, x ahead and z up.
        feet: frames of the feet.
        height: of the trunk's origin above flat ground in the rest pose [m].
    """

    stiffness: tuple[float, ...]
    damping: tuple[float, ...]
    trunk: str
    feet: tuple[str, ...]
    height: float
    kind: str = field(default="legged", init=False)


@dataclass(frozen=True)
class RotorSpec:
    """A rotor: its place in the body's frame [m], and torque about z for each newton of thrust [m], positive if it turns the
    body counterclockwise as seen from above.
    """

    name: str
    place: tuple[float, float]
    torque: float


@dataclass(frozen=True)
class RotorcraftSpec(RobotSpec):
    """A rotorcraft, whose rotors are commanded in revolutions per minute.

    Attributes:
        rotors: in the order of every rotor vector.
        rpm: the least and the most that may be commanded.
        thrust: of a rotor for each squared revolution per minute [N].
        delay: time constant of the rotors' answer [s].
        body: the frame of its body, x ahead and z up.
    """

    rotors: tuple[RotorSpec, ...]
    rpm: tuple[float, float]
    thrust: float
    delay: float
    body: str
    kind: str = field(default="rotorcraft", init=False)


KINDS: dict[str, Any] = {"arm": ArmSpec, "legged": LeggedSpec, "rotorcraft": RotorcraftSpec}


def _tuples(value: Any) -> Any:
    """Tuples in place of lists, which JSON has made of them."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _record(cls: type) -> Callable[[dict[str, Any]], Any]:
    return lambda data: cls(**{key: _tuples(value) for key, value in data.items()})


_PARTS: dict[str, Callable[[Any], Any]] = {
    "joints": lambda rows: tuple(map(_record(JointSpec), rows)),
    "rotors": lambda rows: tuple(map(_record(RotorSpec), rows)),
    "impedance": _record(ImpedanceSpec),
    "motion": _record(MotionSpec),
    **dict.fromkeys(("workspace", "stiffness", "damping", "feet", "rpm"), _tuples),
}


def digest(spec: Any) -> str:
    """A short hash of a specification's content, equal on every machine."""
    return hashlib.sha256(json.dumps(asdict(spec), sort_keys=True).encode()).hexdigest()[:16]
