"""Fly a quadrotor by the speeds of its rotors: stay in place (`hover`), or follow a moving goal (`track`).

The plant, its starts, its noise and its disturbances are those of "Learning to Fly in Seconds" (arXiv 2311.13081); MuJoCo
delays thrust where the paper delays rotor speed, see `build_rotorcraft`. The base frame stands still, z up, its origin where
the robot is to hover; nothing is there to touch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from embodied.sim.resets import ResetBank, content_hash
from embodied.sim.robots import check_kind
from embodied.sim.robots.rotorcraft import Rotorcraft, build_rotorcraft, hover_speed
from embodied.sim.tasks.checks import check_episode, check_options, check_range
from embodied.sim.tasks.physics import noisy, put
from embodied.spec.observe import command, observe, start_memory
from embodied.spec.policy import PolicySpec, RotorSpeeds, Term
from embodied.spec.protocols import Engine, Obs
from embodied.spec.registry import register
from embodied.spec.rotations import normalise, quat_to_matrix, rotvec_to_quat

GRAVITY = 9.81
BANK_SEED = 20261130  # every run of the same task starts from the same bank
VERSION = 1  # of the distribution of starts: part of a bank's content hash
NOISE = {"body_pos": 0.001, "body_quat": 0.0005, "body_linvel": 0.002, "gyro": 0.002}
"""Sigma of what the policy is told: m, half a radian for a quaternion's component, m/s, rad/s."""
FORCE, TORQUE = 1 / 20, 1 / 10000
"""Sigma of an episode's constant disturbance: shares of the weight [N], and of it in N m."""
CLOSE = 0.1  # scale of the part of the reward that pulls near the goal [m]


@dataclass
class FlightRandomiseOptions:
    """Ranges of physics drawn anew from nominal at every training reset: factors."""

    thrust: list[float] = field(default_factory=lambda: [0.95, 1.05])
    mass: list[float] = field(default_factory=lambda: [0.95, 1.05])
    inertia: list[float] = field(default_factory=lambda: [0.9, 1.1])


@dataclass
class FlightRewardOptions:
    """What a step is worth: `alive` and `near`, less weighted costs; nothing is added when the robot leaves its box."""

    alive: float = 2.0
    position: float = 2.5  # by m^2
    near: float = 3.0  # times exp(-d / CLOSE), d the distance from the goal
    tilt: float = 2.5  # by 1 - q_w^2
    velocity: float = 0.005  # by (m/s)^2
    action: float = 0.005  # by the squared distance from hovering


@dataclass
class FlightBankOptions:
    """Where episodes start, in training and in evaluation."""

    size: int = 4096  # configurations of the training bank
    max_angle: float = 90.0  # of the attitude from upright [degrees]
    at_rest: float = 0.1  # share upright and still at the origin


@dataclass
class HoverOptions:
    """Options of the task `hover`."""

    episode_s: float = 10.0
    training_s: float = 5.0  # after which a world of training starts anew
    box: float = 0.6  # half the side of the cube about the goal that must not be left [m]
    history: int = 16  # past actions that the policy sees
    near: float = 0.1  # mean distance from the goal over the last half of an episode that counts as success [m]
    disturb: bool = True
    randomise: FlightRandomiseOptions = field(default_factory=FlightRandomiseOptions)
    bank: FlightBankOptions = field(default_factory=FlightBankOptions)
    reward: FlightRewardOptions = field(default_factory=FlightRewardOptions)


@dataclass
class TrackOptions(HoverOptions):
    """Options of the task `track`: those of `hover`, and the path, an amplitude and a frequency by axis from these ranges."""

    amplitude: list[float] = field(default_factory=lambda: [0.2, 0.5])  # [m]
    frequency: list[float] = field(default_factory=lambda: [0.1, 0.3])  # [Hz]


def check(options: HoverOptions) -> None:
    """Refuse options that no world could be built from.

    Raises:
        BadInput: an impossible value.
    """
    bank = options.bank
    check_episode("episode_s", options.episode_s, 1.0)
    check_episode("training_s", options.training_s, 0.5)
    check_options(
        options,
        (
            ("box", 0.1 <= options.box <= 100, "0.1 to 100 m"),
            ("bank.size", bank.size >= 1, "at least 1"),
            ("bank.max_angle", 0 <= bank.max_angle <= 180, "0 to 180 degrees"),
            ("bank.at_rest", 0 <= bank.at_rest <= 1, "a share from 0 to 1"),
            ("history", 0 <= options.history <= 1000, "0 to 1000"),
            ("near", options.near > 0, "more than 0 m"),
        ),
    )
    ranges = {f"randomise.{name}": low_high for name, low_high in asdict(options.randomise).items()}
    if isinstance(options, TrackOptions):
        ranges |= {"amplitude": options.amplitude, "frequency": options.frequency}
    for name, low_high in ranges.items():
        check_range(name, low_high)


def policy_spec(task: str, craft: Rotorcraft, options: HoverOptions) -> PolicySpec:
    """What the policy of these tasks sees and commands."""
    goal = "goal" if isinstance(options, TrackOptions) else "base"
    terms = [
        Term("position", "position", "m", 0.3, of="body", frame=goal),
        Term("attitude", "rotation_matrix", "1", 1.0, of="body"),
        Term("velocity", "linear_velocity", "m/s", 1.0, of="body"),
        Term("angular velocity", "gyro", "rad/s", 3.0, of="body"),
    ]
    if isinstance(options, TrackOptions):
        terms.append(Term("goal's velocity", "linear_velocity", "m/s", 1.0, of="goal"))
        terms.append(Term("goal to come", "position", "m", 0.3, of="ahead", frame="goal"))
    if options.history:
        terms.append(Term("past actions", "past_actions", "1", 1.0, count=options.history))
    return PolicySpec(task, craft.spec, tuple(terms), RotorSpeeds(), None, options.episode_s)


class Flight:
    """The learning problem of both tasks. Success is judged at the time limit, which truncates: flying has no end."""

    parameters = ("body_mass", "body_inertia", "actuator_gainprm")
    fields: tuple[str, ...] = ("qpos", "qvel", "act")
    mirror = None
    time_limit_fails = False

    def __init__(self, name: str, options: HoverOptions, craft: Rotorcraft) -> None:
        check(options)
        check_kind(name, craft, Rotorcraft, "crazyflie")
        self.name, self.options, self.craft = name, options, craft
        self.spec = policy_spec(name, craft, options)
        self.path = options if isinstance(options, TrackOptions) else None
        self.failure_cost = 0.0  # leaving the box ends what an episode earns: cost enough
        self.training_steps = round(options.training_s / craft.spec.control_dt)
        self.bank_size = options.bank.size
        self.delayed = craft.spec.delay > 0
        self.model = build_rotorcraft(craft).compile()
        privileged = 3 + 9 + 6 + 4 + 4 + 6 + (6 if self.path else 0)
        self.obs_sizes = {"policy": self.spec.obs_size, "critic": privileged}
        self.weight = craft.mass * GRAVITY
        low, high = craft.spec.rpm
        self.rest_action = 2.0 * (hover_speed(craft) - low) / (high - low) - 1.0
        self.top = craft.spec.thrust * high**2
        if not self.delayed:
            self.fields = ("qpos", "qvel")
        weights = options.reward
        self._costs = torch.tensor(
            [weights.position] * 3 + [-weights.tilt] + [weights.velocity] * 3 + [weights.action] * self.spec.action.size
        )
        body = self.model.body(craft.spec.body).id
        knobs = {
            "mass": ("body_mass", (body,)),
            "inertia": ("body_inertia", (body,)),
            "thrust": ("actuator_gainprm", (slice(None), 0)),
        }
        self._knobs = {
            name: (key, where, torch.tensor(getattr(self.model, key)[where])) for name, (key, where) in knobs.items()
        }

    # -- worlds ------------------------------------------------------------------------------------------------------

    def randomise(self, engine: Engine, mask: Tensor, generator: torch.Generator, on: bool) -> dict[str, Tensor]:
        """Draw the physics of the worlds of `mask` from nominal and commit it; the factors [N] of thrust, mass and inertia."""
        uniform = torch.rand(len(self._knobs), engine.num_worlds, generator=generator, device=engine.device)
        factors = {}
        for share, (name, (key, where, nominal)) in zip(uniform, self._knobs.items(), strict=True):
            low, high = getattr(self.options.randomise, name) if on else (1.0, 1.0)
            factors[name] = low + (high - low) * share
            wide = factors[name].double().view(-1, *[1] * nominal.ndim)
            put(engine, key, where, nominal.to(engine.device) * wide, mask)
        engine.commit(mask)
        return factors

    def start(self, engine: Engine, factors: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Disturbance, path and memory of new episodes, of every world."""
        count, device = engine.num_worlds, engine.device
        truth = self._truth(engine)
        state = start_memory(self.spec, truth)
        state["last_action"] = torch.full_like(state["last_action"], self.rest_action)
        if self.spec.history:
            state["past_actions"] = torch.full_like(state["past_actions"], self.rest_action)
        sigma = torch.tensor([FORCE] * 3 + [TORQUE] * 3, device=device) * (self.weight if self.options.disturb else 0.0)
        state["disturbance"] = sigma * torch.randn(count, 6, generator=generator, device=device)
        state["time"] = torch.zeros(count, 1, device=device)
        state["error_sum"], state["error_count"] = (torch.zeros(count, device=device) for _ in range(2))
        if self.path:
            uniform = torch.rand(count, 6, generator=generator, device=device)
            (low, high), (slow, fast) = self.path.amplitude, self.path.frequency
            side = 1.0 - 2.0 * (torch.rand(count, 3, generator=generator, device=device) < 0.5).float()
            state["amplitude"] = side * (low + (high - low) * uniform[:, :3])
            state["rate"] = 2.0 * math.pi * (slow + (fast - slow) * uniform[:, 3:])
        return state

    def command(self, engine: Engine, action: Tensor, state: dict[str, Tensor], readings: dict[str, Tensor]) -> None:
        """Rotor speeds for an action [N, 4], as the thrust that they give at rest; the disturbance goes on."""
        memory = command(self.spec, action, readings, state)
        speeds = memory.pop("rotor_speeds")
        state.update(memory)
        state["time"] = state["time"] + self.craft.spec.control_dt
        engine.write("ctrl", self.craft.spec.thrust * speeds.square())
        if self.options.disturb:
            wrench = torch.zeros(engine.num_worlds, self.model.nbody, 6, device=engine.device)
            wrench[:, -1] = state["disturbance"]
            engine.write("xfrc_applied", wrench)

    def disturb(self, engine: Engine, state: dict[str, Tensor], generator: torch.Generator) -> None:
        """Nothing beside what goes on all the time, see `command`."""

    def _truth(self, engine: Engine) -> dict[str, Tensor]:
        qpos, qvel = engine.read("qpos"), engine.read("qvel")
        return {
            "body_pos": qpos[:, :3],
            "body_quat": qpos[:, 3:7],
            "body_linvel": qvel[:, :3],
            "gyro": qvel[:, 3:6],
            "thrust": engine.read("act" if self.delayed else "ctrl"),
        }

    def look(
        self, engine: Engine, state: dict[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """True readings, and the noisy ones that the policy gets."""
        truth = self._truth(engine)
        if self.path:
            truth |= self._goal(state)
        seen = noisy(truth, NOISE, generator)
        seen["body_quat"] = normalise(seen["body_quat"])
        return truth, seen

    def _goal(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The goal on its Lissajous curve: A sin(w t) by axis, now and AHEAD seconds on."""
        time = state["time"]
        amplitude, rate = state["amplitude"], state["rate"]
        pos = amplitude * (rate * time).sin()
        upright = torch.zeros(len(pos), 4, device=pos.device)
        upright[:, 0] = 1.0
        return {
            "goal_pos": pos,
            "goal_quat": upright,
            "goal_linvel": amplitude * rate * (rate * time).cos(),
            "ahead_pos": amplitude * (rate * (time + AHEAD)).sin(),
        }

    def observe(self, truth: dict[str, Tensor], seen: dict[str, Tensor], state: dict[str, Tensor]) -> Obs:
        """What the policy sees; and for the critic the truth, with thrust and disturbance in place of the history."""
        path = [truth["goal_linvel"], (truth["ahead_pos"] - truth["goal_pos"]) / 0.3] if self.path else []
        privileged = [
            self.offset(truth) / 0.3,
            quat_to_matrix(truth["body_quat"]),
            truth["body_linvel"],
            truth["gyro"] / 3.0,
            truth["thrust"] / self.top,
            state["last_action"],
            state["disturbance"][:, :3] / (FORCE * self.weight),
            state["disturbance"][:, 3:] / (TORQUE * self.weight),
            *path,
        ]
        return {"policy": observe(self.spec, seen, state), "critic": torch.cat(privileged, -1)}

    def offset(self, truth: dict[str, Tensor]) -> Tensor:
        """Where the robot is, from where it is to be [N, 3] m."""
        return truth["body_pos"] - truth["goal_pos"] if self.path else truth["body_pos"]

    def judge(self, truth: dict[str, Tensor], state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Reward [N], success and failure bool [N]; sums up the distance over the last half of the episode."""
        weights, offset = self.options.reward, self.offset(truth)
        distance = offset.norm(dim=-1)
        late = state["elapsed"] > 0.5
        state["error_sum"] = state["error_sum"] + late * distance
        state["error_count"] = state["error_count"] + late
        failure = offset.abs().amax(-1) > self.options.box
        success = (state["elapsed"] >= 1.0) & (self.mean_error(state) < self.options.near) & ~failure
        # the costs as one product, for the step of a world this small takes less time than many operations would
        terms = torch.cat(
            [offset, truth["body_quat"][:, :1], truth["body_linvel"], state["last_action"] - self.rest_action], -1
        )
        near = weights.near * (-distance / CLOSE).exp()
        reward = weights.alive + near - weights.tilt - terms.square() @ self._costs.to(offset.device)
        return reward * ~failure, success, failure

    def mean_error(self, state: dict[str, Tensor]) -> Tensor:
        """Mean distance from the goal [N] m so far in the last half of the episode; NaN before it."""
        return state["error_sum"] / state["error_count"]

    def errors(self, truth: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Mean distance from the goal so far in the last half of the episode, [N] m; NaN for who did not get there."""
        return {"position_m": self.mean_error(state)}

    # -- where episodes start ----------------------------------------------------------------------------------------

    def bank_hash(self, signature: str) -> str:
        """The content hash of this task's bank on the engine of that signature."""
        return content_hash({"version": VERSION, "signature": signature, "bank": asdict(self.options.bank)})

    def make_bank(self, engine: Engine) -> ResetBank:
        """The training bank; difficulty is the angle from upright [rad]."""
        generator = torch.Generator().manual_seed(BANK_SEED)
        rows, angles = [], []
        missing = self.options.bank.size
        while missing > 0:
            some, angle = self._starts(engine, generator)
            rows.append(some[:missing])
            angles.append(angle[:missing])
            missing -= len(some)
        tags = torch.zeros(self.options.bank.size, dtype=torch.int64)
        key = self.bank_hash(engine.signature)
        return ResetBank(torch.cat(rows), tags, ("air",), engine.signature, key, torch.cat(angles))

    def fresh_starts(self, engine: Engine, generator: torch.Generator) -> Tensor:
        """Rows [N, S] of starts as in training, but new ones."""
        return self._starts(engine, generator)[0].to(engine.device)

    def _starts(self, engine: Engine, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """State rows [N, S] and the angle from upright [N] rad of a start in each world; the engine's worlds are used up.

        Position within 0.2 m, attitude by up to `max_angle` about any axis, velocities within 1 m/s and 1 rad/s by axis;
        `at_rest` of them upright and still at the origin. Rotors turn at hovering speed.
        """
        count = engine.num_worlds
        signed = 2.0 * torch.rand(count, 9, generator=generator, dtype=torch.float64) - 1.0
        axis = torch.randn(count, 3, generator=generator, dtype=torch.float64)
        share, still = torch.rand(2, count, generator=generator, dtype=torch.float64)
        angle = math.radians(self.options.bank.max_angle) * share
        moving = (still >= self.options.bank.at_rest).double()[:, None]
        angle = angle * moving[:, 0]
        quat = rotvec_to_quat(angle[:, None] * axis / axis.norm(dim=-1, keepdim=True))
        engine.set_state(engine.default_row.expand(count, -1))
        engine.write("qpos", torch.cat([0.2 * moving * signed[:, :3], quat], -1).to(engine.device))
        engine.write("qvel", (moving * signed[:, 3:]).to(engine.device))
        if self.delayed:
            rotors = self.spec.action.size
            thrust = torch.full((count, rotors), self.weight / rotors, dtype=torch.float64)
            engine.write("act", thrust.to(engine.device))
        return engine.get_state().cpu(), angle


AHEAD = 0.2  # how far on the goal is shown [s]
USUAL = {
    "robot": "crazyflie",
    "sampler": "uniform",
    "sim.num_worlds": 512,
    "policy.hidden": [64, 64],
    "algo.critic_hidden": [64, 64],
    "algo.num_steps": 16,
    "algo.epochs": 3,
    "algo.desired_kl": 0.03,
    "algo.learning_rate": 0.003,
    "algo.entropy": 0.0,
    # an evaluation of 10 s takes as long as some hundred thousand steps: train so long, and evaluate once
    "budget.env_steps": 900_000,
    "budget.target_success": None,
    "eval.every": 1000,
}


@register("task", "hover", HoverOptions, USUAL)
def hover(options: HoverOptions, craft: Rotorcraft) -> Flight:
    """Hold a quadrotor in place from any attitude, by its rotors' speeds, with slow motors and under disturbances."""
    return Flight("hover", options, craft)


@register("task", "track", TrackOptions, USUAL)
def track(options: TrackOptions, craft: Rotorcraft) -> Flight:
    """Follow a Lissajous curve with a quadrotor, by its rotors' speeds."""
    return Flight("track", options, craft)


for _task in (hover, track):
    _task.validate = check  # type: ignore[attr-defined]  # functions take attributes, their types do not say so
