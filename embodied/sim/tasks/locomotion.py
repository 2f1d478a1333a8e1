"""Walk where a velocity command says: ahead, sideways, turning, or stand; on a plane or on rough ground."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from embodied.sim.resets import ResetBank, content_hash
from embodied.sim.robots import check_kind
from embodied.sim.robots.legged import Legged
from embodied.sim.tasks import symmetry
from embodied.sim.tasks.checks import check_episode, check_options
from embodied.sim.tasks.terrains import plane, rough_ground
from embodied.sim.tasks.walker import (
    TOUCH,
    Walker,
    WalkerBankOptions,
    WalkerRandomiseOptions,
    check_randomise,
    joint_targets,
    proprioception,
)
from embodied.spec.errors import BadInput
from embodied.spec.observe import observe, start_memory
from embodied.spec.policy import PolicySpec, Term
from embodied.spec.protocols import Engine, Obs
from embodied.spec.registry import register

SMOOTH_S = 0.25  # time constant over which the velocity is smoothed that is rewarded: half a trot's period [s]
BANK_SEED = 20261130  # every run of the same task starts from the same bank
GROUND_SEED, START = 0, 1.0
"""Of rough ground; episodes begin so near its middle along x and y [m]."""
VERSION = 1  # of the distribution of starts: part of a bank's content hash

FIGURES = ("velocity_error_m_s", "turn_error_rad_s", "feet_in_air", "action_rate", "power_w", "airborne_s", "landings")
"""Means over an episode: errors of velocity and yaw rate, share of the feet in the air, squared change of action, power;
seconds that landing feet were in the air and how many landed, a step, whose quotient `errors` gives as `swing_s`."""


@dataclass
class CommandOptions:
    """Velocity commands: uniform within these bounds, one for an episode; in training they also change on the way."""

    ahead: float = 1.0  # m/s, forwards and backwards
    sideways: float = 0.5  # m/s
    turn: float = 1.0  # rad/s
    stand: float = 0.1  # share of commands to stand still
    change_s: float = 30.0  # mean time between changes in training [s]; often, and returns cannot be foreseen


@dataclass
class LocomotionRewardOptions:
    """What a control step is worth: following the command, less weighted efforts."""

    velocity: float = (
        1.5  # times exp(-e^2 / 0.05) + 1 - s, e the error of the velocity over ground, s of the smoothed one [m/s]
    )
    turn: float = 0.75  # times exp(-e^2 / 0.1) + 1 - s / 2, e the error of the yaw rate, s of the smoothed one [rad/s]
    trot: float = 1.5  # see `Walker.trot`
    torque: float = 1e-5
    acceleration: float = 1e-7
    action_rate: float = 0.1
    bounce: float = 0.5
    roll: float = 0.02
    tilt: float = 0.5
    pose: float = 0.01
    fall: float = 10.0  # once


@dataclass
class LocomotionOptions:
    """Options of the task `locomotion`."""

    episode_s: float = 10.0
    near: float = 0.15  # mean error of the velocity over an episode that counts as success [m/s]
    bank: WalkerBankOptions = field(default_factory=lambda: WalkerBankOptions(1024))
    rough: float = 0.0  # highest bump of the ground [m]; 0 is flat
    command: CommandOptions = field(default_factory=CommandOptions)
    randomise: WalkerRandomiseOptions = field(default_factory=WalkerRandomiseOptions)
    reward: LocomotionRewardOptions = field(default_factory=LocomotionRewardOptions)


def check(options: LocomotionOptions) -> None:
    """Refuse options that no world could be built from.

    Raises:
        BadInput: an impossible value.
    """
    asked = options.command
    check_episode("episode_s", options.episode_s, 1.0)
    check_options(
        options,
        (
            ("near", options.near > 0, "more than 0 m/s"),
            ("bank.size", options.bank.size >= 1, "at least 1"),
            ("rough", 0 <= options.rough <= 0.3, "0 (flat) to 0.3 m"),
        ),
    )
    if min(asked.ahead, asked.sideways, asked.turn) < 0 or not 0 <= asked.stand <= 1 or asked.change_s <= 0:
        raise BadInput(f"task.command={asdict(asked)}: expected speeds of 0 or more, a share, and a positive time")
    if options.rough and (side := ground_side(options)) > 100:
        raise BadInput(f"task.rough on {side:.0f} m x {side:.0f} m of ground: shorten task.episode_s, or walk more slowly")
    check_randomise(options.randomise)


def ground_side(options: LocomotionOptions) -> float:
    """Side of the square of rough ground that no episode leaves [m]."""
    return 2.0 * (START + 1.0 + 1.2 * options.episode_s * math.hypot(options.command.ahead, options.command.sideways))


def policy_spec(legged: Legged, options: LocomotionOptions) -> PolicySpec:
    """What the policy of this task sees and commands on `legged`."""
    terms = (*proprioception(legged.spec.trunk), Term("command", "request", "m/s, rad/s", 1.0, count=3))
    return PolicySpec("locomotion", legged.spec, terms, joint_targets(legged), None, options.episode_s)


USUAL = {
    "robot": "go1",
    "sampler": "uniform",
    # more noise than this carries a robot along by itself: then the sampling policy walks, and its mean stands
    "policy.init_std": 0.3,
    "algo.entropy": 0.0,
    "algo.desired_kl": 0.03,
    "algo.symmetry": True,
    "eval.every": 25,
}


@register("task", "locomotion", LocomotionOptions, USUAL)
class Locomotion:
    """Walk on four legs as a velocity command says, blind, by joint position targets."""

    validate = staticmethod(check)
    name = "locomotion"
    parameters = Walker.parameters
    fields = Walker.fields
    time_limit_fails = False
    rest_action = 0.0

    def __init__(self, options: LocomotionOptions, legged: Legged) -> None:
        check(options)
        check_kind(self.name, legged, Legged, "go1")
        self.options, self.legged = options, legged
        self.spec = policy_spec(legged, options)
        ground = rough_ground(options.rough, ground_side(options), GROUND_SEED) if options.rough else plane()
        self.walker = Walker(legged, ground, options.randomise)
        self.model = self.walker.model
        self.failure_cost = options.reward.fall
        self.training_steps = self.spec.max_steps
        self.bank_size = options.bank.size
        pace = [0, 1, 2], [1.0, -1.0, -1.0]
        feet = symmetry.limbs(legged), [1.0] * len(legged.limbs)
        self.mirror = symmetry.mirror(legged, self.spec, pace, (*self.walker.mirror, pace, feet))
        self.obs_sizes = {group: len(self.mirror[group][0]) for group in ("policy", "critic")}

    def randomise(self, engine: Engine, mask: Tensor, generator: torch.Generator, on: bool) -> dict[str, Tensor]:
        """See `Walker.randomise`."""
        return self.walker.randomise(engine, mask, generator, on)

    def start(self, engine: Engine, factors: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Command, memory and gait of new episodes, of every world."""
        truth = self.walker.truth(engine)
        state = start_memory(self.spec, truth) | self.walker.start(truth)
        state |= {f"factor/{name}": value for name, value in factors.items()}
        state["request"] = self._draw_request(engine, generator)
        state["sums"] = torch.zeros(engine.num_worlds, len(FIGURES), device=engine.device)
        state["count"] = torch.zeros(engine.num_worlds, device=engine.device)
        state["smooth"] = self._pace(truth)
        return state

    def _draw_request(self, engine: Engine, generator: torch.Generator) -> Tensor:
        asked = self.options.command
        uniform = torch.rand(engine.num_worlds, 4, generator=generator, device=engine.device)
        bounds = uniform.new_tensor([asked.ahead, asked.sideways, asked.turn])
        return (2.0 * uniform[:, :3] - 1.0) * bounds * (uniform[:, 3:] >= asked.stand)

    def command(self, engine: Engine, action: Tensor, state: dict[str, Tensor], readings: dict[str, Tensor]) -> None:
        """Turn an action [N, A] into joint targets."""
        self.walker.command(self.spec, engine, action, state, readings)

    def disturb(self, engine: Engine, state: dict[str, Tensor], generator: torch.Generator) -> None:
        """In training, pushes and changes of the command."""
        chance = self.legged.spec.control_dt / self.options.command.change_s * state["factor/restless"]
        changed = torch.rand(engine.num_worlds, generator=generator, device=engine.device) < chance
        state["request"] = torch.where(changed[:, None], self._draw_request(engine, generator), state["request"])
        self.walker.push(engine, state, generator)

    def look(
        self, engine: Engine, state: dict[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """True readings, and the noisy ones that the policy gets."""
        truth = self.walker.truth(engine)
        truth["request"] = state["request"]
        return truth, self.walker.noisy(truth, generator)

    def observe(self, truth: dict[str, Tensor], seen: dict[str, Tensor], state: dict[str, Tensor]) -> Obs:
        """Observation groups; the critic also has `Walker.privileged`, the smoothed velocity and the feet's time in the air."""
        privileged = [*self.walker.privileged(truth, state), state["smooth"], state["air_s"].clamp(max=1.0) / 0.5]
        critic = torch.cat([observe(self.spec, truth, state), *privileged], -1)
        return {"policy": observe(self.spec, seen, state), "critic": critic}

    def judge(self, truth: dict[str, Tensor], state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Reward [N], success and failure bool [N]; sums up the episode's figures."""
        weights, asked = self.options.reward, truth["request"]
        # of the velocity over ground, in the trunk's frame
        error = (asked[:, :2] - truth["velocity"][:, :2]).norm(dim=-1)
        turn_error = asked[:, 2] - truth["gyro"][:, 2]
        # what pulls from afar is of the smoothed velocity: whatever moves also sways, at first more than it gets on
        pace = self._pace(truth)
        state["smooth"] = state["smooth"] + self.legged.spec.control_dt / SMOOTH_S * (pace - state["smooth"])
        off = asked - state["smooth"]
        drift, spin = off[:, :2].norm(dim=-1), off[:, 2].abs()
        efforts = self.walker.efforts(truth, state)
        in_air = (truth["clearance"] > TOUCH).float().mean(-1)
        landed = self.walker.landed(truth, state)
        swings = landed.sum(-1), (landed > 0).float().sum(-1)
        figures = [error, turn_error.abs(), in_air, efforts["action_rate"], self.walker.power(truth), *swings]
        state["sums"], state["count"] = state["sums"] + torch.stack(figures, -1), state["count"] + 1.0
        failure = self.walker.fallen(truth)
        success = (state["elapsed"] >= 1.0) & (state["sums"][:, 0] < self.options.near * state["count"]) & ~failure
        moving = asked.square().sum(-1) > 0.01
        reward = (
            # the one part pulls from afar, the other keeps near; below zero, falling early would pay
            weights.velocity * ((-error.square() / 0.05).exp() + 1.0 - drift)
            + weights.turn * ((-turn_error.square() / 0.1).exp() + 1.0 - 0.5 * spin)
            + weights.trot * self.walker.trot(truth, state) * moving
        )
        for name, effort in efforts.items():
            reward = reward - getattr(weights, name) * effort
        return reward, success, failure

    @staticmethod
    def _pace(truth: dict[str, Tensor]) -> Tensor:
        """Velocity ahead and to the left [m/s], yaw rate [rad/s]: [N, 3]."""
        return torch.cat([truth["velocity"][:, :2], truth["gyro"][:, 2:]], -1)

    def errors(self, truth: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over the episode so far, [N]: see `FIGURES`; `swing_s` is how long a foot is in the air."""
        means = state["sums"] / state["count"].clamp(min=1.0)[:, None]
        figures = dict(zip(FIGURES, means.unbind(-1), strict=True))
        airborne, landings = figures.pop("airborne_s"), figures.pop("landings")
        return figures | {"swing_s": airborne / landings.clamp(min=1e-6)}

    # -- where episodes start ----------------------------------------------------------------------------------------

    def bank_hash(self, signature: str) -> str:
        """The content hash of this task's bank on the engine of that signature."""
        return content_hash({"version": VERSION, "signature": signature, "size": self.bank_size, "rough": self.options.rough})

    def make_bank(self, engine: Engine) -> ResetBank:
        """The training bank."""
        generator = torch.Generator().manual_seed(BANK_SEED)
        rows = [self.fresh_starts(engine, generator) for _ in range(math.ceil(self.bank_size / engine.num_worlds))]
        tags = torch.zeros(self.bank_size, dtype=torch.int64)
        key = self.bank_hash(engine.signature)
        return ResetBank(torch.cat(rows)[: self.bank_size].cpu(), tags, ("standing",), engine.signature, key)

    def fresh_starts(self, engine: Engine, generator: torch.Generator) -> Tensor:
        """Rows [N, S]: near the rest pose, just above the ground, in any direction, moving a little."""
        count, robot = engine.num_worlds, self.legged.spec
        signed = 2.0 * torch.rand(count, len(robot.joints) + 9, generator=generator, dtype=torch.float64) - 1.0
        half = math.pi / 2 * signed[:, 0]
        flat = torch.zeros(count, 2, dtype=torch.float64)
        quat = torch.cat([half.cos()[:, None], flat, half.sin()[:, None]], -1)
        joints = torch.tensor(robot.home, dtype=torch.float64) + 0.1 * signed[:, 9:]
        velocity = torch.cat([0.3 * signed[:, 3:9], torch.zeros(count, len(robot.joints), dtype=torch.float64)], -1)
        self.walker.place(engine, START * signed[:, 1:3], quat, joints, 0.02)
        engine.write("qvel", velocity.to(engine.device))
        return engine.get_state()
