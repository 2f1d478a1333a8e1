"""Options of the assembly task."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from embodied.sim.tasks.checks import check_episode, check_range
from embodied.sim.tasks.parts import PARTS
from embodied.spec.errors import BadInput, nearest

MIN_CLEARANCE = 0.0002
"""A side [m]. Contacts give way by up to a tenth of a millimetre: they would decide what fits a tighter hole."""


@dataclass
class RandomiseOptions:
    """Ranges of physics drawn anew from nominal at every training reset: factors, but for the delay."""

    friction: list[float] = field(default_factory=lambda: [0.5, 1.6])
    gains: list[float] = field(default_factory=lambda: [0.8, 1.2])
    mass: list[float] = field(default_factory=lambda: [0.7, 1.3])
    clearance: list[float] = field(default_factory=lambda: [0.8, 1.2])
    delay: float = 0.5  # share of worlds whose commands act one control step late


@dataclass
class RewardOptions:
    """Sparse reward and its regularisers (arXiv 2610.12465)."""

    success: float = 100.0
    failure: float = 1.0  # charged at the time limit, or when the tip strays from the cell
    action: float = 1e-5
    action_rate: float = 1e-4
    joint_velocity: float = 1e-4


@dataclass
class BankOptions:
    """The reset bank: how many configurations, and which share of each kind."""

    size: int = 2048
    inserted: float = 0.4  # in the hole, evenly over its depth
    near: float = 0.35  # above the mouth, log-uniform from 0.3 to 30 mm
    far: float = 0.25  # 30 to 100 mm from the mouth, as evaluation starts


@dataclass
class AssemblyOptions:
    """Options of the task `assembly`."""

    part: str = "peg"
    clearance: float = 0.0005  # a side [m]
    episode_s: float | None = None  # null: as long as the part takes
    socket_range: float = 0.05  # the socket's position varies by so much in x and y [m]
    socket_yaw: float = 20.0  # and its yaw by so much [degrees]
    pose_bias: float = 0.0005  # sigma of the seen socket's position error, an episode [m]
    pose_noise: float = 0.0001  # and a step [m]
    yaw_bias: float = 0.3  # sigma of the seen socket's yaw error, an episode [degrees]
    see_socket: bool = True  # false: the policy sees the cell's centre in place of the socket (a control experiment)
    success_depth: float | None = None  # [m]; null: the part's own
    success_tilt: float = 2.0  # [degrees]
    success_penetration: float = 0.0003  # [m]
    success_steps: int = 5  # control steps for which success must hold
    stray_distance: float = 0.15  # of the tip from the mouth, beyond which an episode has failed [m]
    randomise: RandomiseOptions = field(default_factory=RandomiseOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    bank: BankOptions = field(default_factory=BankOptions)


def check(options: AssemblyOptions) -> None:
    """Refuse options that no world could be built from.

    Raises:
        BadInput: an unknown part or an impossible value.
    """
    if options.part not in PARTS:
        raise BadInput(f"unknown task.part '{options.part}': {nearest(options.part, PARTS)}")
    part = PARTS[options.part]
    if not MIN_CLEARANCE <= options.clearance <= part.max_clearance:
        low, high = MIN_CLEARANCE, part.max_clearance
        raise BadInput(f"task.clearance={options.clearance} m a side: expected {low} to {high} with task.part={options.part}")
    if options.episode_s is not None:
        check_episode("episode_s", options.episode_s, 0.5)
    if options.success_depth is not None and not 0 < options.success_depth < part.hole:
        raise BadInput(
            f"task.success_depth={options.success_depth}: expected null, or more than 0 and less than the hole's {part.hole} m"
        )
    if part.turn is not None and options.success_depth is not None and options.success_depth < part.depth:
        raise BadInput(f"task.success_depth={options.success_depth}: a {options.part} is locked from {part.depth} m on")
    bank = options.bank
    shares = (bank.inserted, bank.near, bank.far)
    if bank.size < 1 or min(shares) < 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
        raise BadInput(
            f"task.bank: size {bank.size} must be positive, shares {shares} must not be negative and must add up to 1"
        )
    for name in ("friction", "gains", "mass", "clearance"):
        check_range(f"randomise.{name}", getattr(options.randomise, name))
