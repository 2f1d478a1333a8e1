"""A legged robot on the ground: the physics, sensors, randomisation and costs that tasks on legs share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import mujoco
import torch
from torch import Tensor

from embodied.sim.robots.legged import CONTACT, Legged, build_legged
from embodied.sim.tasks import symmetry
from embodied.sim.tasks.checks import check_range
from embodied.sim.tasks.physics import noisy, put
from embodied.sim.tasks.terrains import GROUND, Ground, add_to, height_at
from embodied.spec.errors import BadInput
from embodied.spec.observe import command
from embodied.spec.policy import JointTargets, PolicySpec, Term
from embodied.spec.protocols import Engine
from embodied.spec.rotations import normalise, rotate_inverse

FRICTION = 0.8  # of a foot on the ground, nominal: rubber on concrete
NOISE = {"trunk_quat": 0.02, "gyro": 0.1, "joint_pos": 0.01, "joint_vel": 0.5}
"""Sigma of what the policy is told: half a radian for a quaternion's component, rad/s, rad, rad/s."""
PERIOD_S, SWING = 0.5, 0.08
"""Of a trot, in which diagonal legs step together: a gait that all tasks on legs suggest, and how high its feet swing [m]."""
TOUCH = 0.005  # of a sole above the ground, below which it counts as touching [m]


@dataclass
class WalkerBankOptions:
    """Where episodes start in training."""

    size: int  # configurations


@dataclass
class WalkerRandomiseOptions:
    """Ranges of physics drawn anew from nominal at every training reset; evaluation is nominal."""

    friction: list[float] = field(default_factory=lambda: [0.5, 1.5])  # factor
    mass: list[float] = field(default_factory=lambda: [-0.5, 1.5])  # added to the trunk [kg]
    centre: list[float] = field(default_factory=lambda: [-0.03, 0.03])  # of the trunk's mass, moved along x and y [m]
    gains: list[float] = field(default_factory=lambda: [0.9, 1.1])  # factor of stiffness and damping
    strength: list[float] = field(default_factory=lambda: [0.9, 1.1])  # factor of the motors' greatest torques
    delay: float = 0.5  # share of worlds whose commands act one control step late
    push: float = 0.5  # change of velocity by a push [m/s], at most, in any direction of the ground
    push_s: float = 4.0  # mean time between pushes [s]


def check_randomise(ranges: WalkerRandomiseOptions) -> None:
    """Refuse ranges that no physics has.

    Raises:
        BadInput: see there.
    """
    for name, lowest in {"friction": 0.0, "gains": 0.0, "strength": 0.0, "mass": -3.0, "centre": -0.2}.items():
        check_range(f"randomise.{name}", getattr(ranges, name), lowest)
    if not 0 <= ranges.delay <= 1 or ranges.push < 0 or ranges.push_s <= 0:
        raise BadInput(
            f"task.randomise: delay={ranges.delay} must be a share, push={ranges.push} m/s not negative, "
            f"push_s={ranges.push_s} s positive"
        )


def proprioception(robot: str = "trunk") -> tuple[Term, ...]:
    """What every policy on legs sees of its robot."""
    return (
        Term("angular velocity", "gyro", "rad/s", 2.0, of=robot),
        Term("down", "gravity", "1", 1.0, of=robot),
        Term("joint positions", "joint_position", "rad", 0.5),
        Term("joint velocities", "joint_velocity", "rad/s", 10.0, clip=3.0),
        Term("last action", "last_action", "1", 1.0),
        Term("gait", "clock", "s", PERIOD_S),
    )


def joint_targets(legged: Legged) -> JointTargets:
    """Actions as targets of the robot's joints."""
    return JointTargets(tuple(link.stroke for limb in legged.limbs for link in limb.links))


class Walker:
    """N robots on one ground. Tensors of a state are by world; `readings` are as in `embodied.spec.observe`."""

    parameters = (
        "pair_friction",
        "body_mass",
        "body_ipos",
        "actuator_gainprm",
        "actuator_biasprm",
        "actuator_forcerange",
    )
    fields = ("qpos", "qvel", "site_xpos", "actuator_force")
    DRAWN = ("delay", "friction", "mass", "gains", "strength", "centre_x", "centre_y")

    def __init__(
        self,
        legged: Legged,
        ground: Ground,
        ranges: WalkerRandomiseOptions,
        furnish: Callable[[mujoco.MjSpec], None] = lambda spec: None,
    ) -> None:
        """`furnish` adds to the model what a task has beside robot and ground."""
        check_randomise(ranges)
        self.legged, self.ground, self.ranges = legged, ground, ranges
        robot = self.robot = legged.spec
        spec, _ = build_legged(legged)
        add_to(spec, ground)
        calves = [f"{limb.name}_{limb.links[-1].name}" for limb in legged.limbs]
        for shape in (*robot.feet, *calves, robot.trunk):
            friction = [FRICTION, FRICTION, 0.005, 0.0001, 0.0001]
            spec.add_pair(name=shape, geomname1=shape, geomname2=GROUND, friction=friction, **CONTACT)
        furnish(spec)
        self.model = spec.compile()
        # legs are in pairs, in front and behind: a leg is on the diagonal of the next pair's other leg
        self._side = torch.tensor([1.0 if (i + i // 2) % 2 == 0 else -1.0 for i in range(len(legged.limbs))])
        self.radius = legged.limbs[0].radius
        self._feet = [self.model.site(name).id for name in robot.feet]
        self._trunk = self.model.body(robot.trunk).id
        self.weight = float(self.model.body_mass.sum()) * 9.81
        self._nominal = {name: torch.tensor(getattr(self.model, name)) for name in self.parameters}

    # -- physics -----------------------------------------------------------------------------------------------------

    def randomise(self, engine: Engine, mask: Tensor, generator: torch.Generator, on: bool) -> dict[str, Tensor]:
        """Draw the physics of the worlds of `mask` from nominal (`on` false: set nominal) and commit it.

        Returns:
            friction, gains, strength (factors), mass [kg], centre_x, centre_y [m], delay (0 or 1), restless (1: pushed about),
            each [N].
        """
        uniform = torch.rand(engine.num_worlds, len(self.DRAWN), generator=generator, device=engine.device)
        factors = {"delay": (uniform[:, 0] < self.ranges.delay).float()}
        for column, name in enumerate(self.DRAWN[1:], 1):
            low, high = getattr(self.ranges, name.removesuffix("_x").removesuffix("_y"))
            factors[name] = low + (high - low) * uniform[:, column]
        factors["restless"] = torch.ones_like(factors["delay"])
        if not on:
            factors = {
                name: torch.full_like(x, float(name in ("friction", "gains", "strength"))) for name, x in factors.items()
            }
        self.set_physics(engine, mask, factors)
        return factors

    def set_physics(self, engine: Engine, mask: Tensor, factors: dict[str, Tensor]) -> None:
        """Give the worlds of `mask` these factors [N], and commit them."""
        nominal = {name: x.to(engine.device) for name, x in self._nominal.items()}
        wanted = {name: x.double() for name, x in factors.items()}
        trunk, every = self._trunk, slice(None)
        moved = torch.stack([wanted["centre_x"], wanted["centre_y"]], -1)
        gains = wanted["gains"][:, None]
        changes: tuple[tuple[str, tuple[int | slice, ...], Tensor], ...] = (
            ("pair_friction", (every, slice(0, 2)), nominal["pair_friction"][:, :2] * wanted["friction"][:, None, None]),
            ("body_mass", (trunk,), nominal["body_mass"][trunk] + wanted["mass"]),
            ("body_ipos", (trunk, slice(0, 2)), nominal["body_ipos"][trunk, :2] + moved),
            ("actuator_gainprm", (every, 0), nominal["actuator_gainprm"][:, 0] * gains),
            ("actuator_biasprm", (every, slice(1, 3)), nominal["actuator_biasprm"][:, 1:3] * gains[..., None]),
            ("actuator_forcerange", (every,), nominal["actuator_forcerange"] * wanted["strength"][:, None, None]),
        )
        for name, where, values in changes:
            put(engine, name, where, values, mask)
        engine.commit(mask)

    def command(
        self,
        spec: PolicySpec,
        engine: Engine,
        action: Tensor,
        state: dict[str, Tensor],
        readings: dict[str, Tensor],
    ) -> None:
        """Joint targets for an action [N, A], one control step late where the world's delay says so."""
        memory = command(spec, action, readings, state)
        late = state["factor/delay"][:, None] > 0.5
        engine.write("ctrl", torch.where(late, state["target_joints"], memory["target_joints"]))
        state["action_rate"] = (memory["last_action"] - state["last_action"]).square().sum(-1)
        state.update(memory)

    def push(self, engine: Engine, state: dict[str, Tensor], generator: torch.Generator) -> None:
        """Now and then a force on the trunk for one control step, where the world is restless."""
        chance = self.robot.control_dt / self.ranges.push_s
        drawn = torch.rand(engine.num_worlds, 3, generator=generator, device=engine.device)
        struck = (drawn[:, 2] < chance) & (state["factor/restless"] > 0.5)
        angle = 2.0 * math.pi * drawn[:, 0]
        impulse = self.ranges.push * self.weight / 9.81 * drawn[:, 1:2] * torch.stack([angle.cos(), angle.sin()], -1)
        force = impulse / self.robot.control_dt
        wrench = torch.zeros(engine.num_worlds, self.model.nbody, 6, device=engine.device)
        wrench[:, self._trunk, :2] = force * struck[:, None]
        engine.write("xfrc_applied", wrench)

    def place(self, engine: Engine, xy: Tensor, quat: Tensor, joints: Tensor, above: float) -> None:
        """Put a robot at rest into every world, at its standing height and `above` [m] over the highest ground under it.

        Args:
            engine: all its worlds are set.
            xy: of the trunk [N, 2] m, float64 on the CPU, as are the others.
            quat: of the trunk [N, 4], upright.
            joints: positions [N, J] rad, which are also their targets.
            above: in addition to what lies under trunk and feet in the rest pose.
        """
        height = self._highest(xy, heading(quat)) + self.robot.height + above
        engine.set_state(engine.default_row.expand(engine.num_worlds, -1))
        engine.write("qpos", torch.cat([xy, height[:, None], quat, joints], -1).to(engine.device))
        engine.write("ctrl", joints.to(engine.device))

    def _highest(self, xy: Tensor, ahead: Tensor) -> Tensor:
        """Height of the highest ground under the trunk and the feet of robots in the rest pose [N] m."""
        data = mujoco.MjData(self.model)
        mujoco.mj_kinematics(self.model, data)
        feet = [data.site(name).xpos[:2] - data.body(self.robot.trunk).xpos[:2] for name in self.robot.feet]
        places = torch.tensor([[0.0, 0.0], *(foot.tolist() for foot in feet)], dtype=xy.dtype)
        left = torch.stack([-ahead[:, 1], ahead[:, 0]], -1)
        return height_at(self.ground.to(xy.device), xy[:, None] + places @ torch.stack([ahead, left], 1)).amax(-1)

    # -- what is seen ------------------------------------------------------------------------------------------------

    def truth(self, engine: Engine) -> dict[str, Tensor]:
        """True readings; beside those that a policy may see: `trunk_pos`, `velocity` in the trunk's frame, `feet` [N, 4, 3],
        `clearance` of soles above the ground [N, 4], `height` of the trunk above it [N], `torques` [N, J].
        """
        qpos, qvel = engine.read("qpos"), engine.read("qvel")
        feet = engine.read("site_xpos")[:, self._feet]
        pos, quat = qpos[:, :3], qpos[:, 3:7]
        places = torch.cat([feet, pos[:, None]], 1)
        above = places[..., 2] if self.ground.flat else places[..., 2] - height_at(self.ground, places[..., :2])
        return {
            "trunk_pos": pos,
            "trunk_quat": quat,
            "velocity": rotate_inverse(quat, qvel[:, :3]),
            "gyro": qvel[:, 3:6],
            "joint_pos": qpos[:, 7:],
            "joint_vel": qvel[:, 6:],
            "feet": feet,
            "clearance": above[:, :-1] - self.radius,
            "height": above[:, -1],
            "torques": engine.read("actuator_force"),
        }

    def privileged(self, truth: dict[str, Tensor], state: dict[str, Tensor]) -> list[Tensor]:
        """What a critic also sees: velocity, height, feet, and the physics drawn; mirrored by `mirror`."""
        drawn = torch.stack([state[f"factor/{name}"] for name in self.DRAWN], -1)
        return [
            truth["velocity"],
            truth["height"][:, None] / 0.3,
            truth["clearance"].clamp(-0.1, 0.3) / 0.1,
            drawn[:, :-2],
            drawn[:, -2:] / 0.03,
        ]

    @property
    def mirror(self) -> list[symmetry.Mirrored]:
        """Of `privileged`."""
        count = len(self.DRAWN)
        feet = symmetry.limbs(self.legged), [1.0] * len(self.legged.limbs)
        return [symmetry.ARROW, ([0], [1.0]), feet, (list(range(count)), [1.0] * (count - 1) + [-1.0])]

    def noisy(self, truth: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """The readings as the policy gets them."""
        seen = noisy(truth, NOISE, generator)
        seen["trunk_quat"] = normalise(seen["trunk_quat"])
        return seen

    def fallen(self, truth: dict[str, Tensor]) -> Tensor:
        """Whether the robot lies or is about to: its trunk is tilted by 60 degrees, or 12 cm above the ground, [N]."""
        quat = truth["trunk_quat"]
        upright = 1.0 - 2.0 * (quat[:, 1].square() + quat[:, 2].square())
        return (upright < 0.5) | (truth["height"] < 0.12)

    # -- gait --------------------------------------------------------------------------------------------------------

    def start(self, truth: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gait's memory at an episode's beginning."""
        self.ground = self.ground.to(truth["height"].device)
        count, device = len(truth["height"]), truth["height"].device
        return {
            "air_s": torch.zeros(count, len(self._feet), device=device),
            "action_rate": torch.zeros(count, device=device),
            "past_joint_vel": truth["joint_vel"],
        }

    def landed(self, truth: dict[str, Tensor], state: dict[str, Tensor]) -> Tensor:
        """How long each foot that has just touched the ground was in the air, 0 for the others [N, 4] s; advances `air_s`."""
        touching = truth["clearance"] < TOUCH
        air = state["air_s"] + self.robot.control_dt
        landed = touching & (state["air_s"] > 0)
        state["air_s"] = torch.where(touching, 0.0, air)
        return air * landed

    def trot(self, truth: dict[str, Tensor], state: dict[str, Tensor]) -> Tensor:
        """How well the feet's height follows a trot [N]: 1 exactly, 0 (on average) standing, less the farther from it.

        In the first half of the period the feet of the first diagonal swing in half a sine, in the second those of the other.
        Linear in the error: a kernel that is flat around standing leads nobody away from it.
        """
        phase = (2.0 * math.pi / PERIOD_S) * state["time"]
        swing = SWING * phase.sin() * self._side.to(phase.device)
        # two feet swing at a time, 2 / pi of SWING high on average
        return 1.0 - (truth["clearance"] - swing.clamp(min=0.0)).abs().sum(-1) / (2.0 * SWING * 2.0 / math.pi)

    @staticmethod
    def power(truth: dict[str, Tensor]) -> Tensor:
        """Of the motors, whichever way it flows [N] W."""
        return (truth["torques"] * truth["joint_vel"]).abs().sum(-1)

    def efforts(self, truth: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What walking costs, each [N]: squared torques, squared joint accelerations, action rate, vertical and rolling motion,
        tilt, distance from the rest pose; advances `past_joint_vel`.
        """
        acceleration = (truth["joint_vel"] - state["past_joint_vel"]) / self.robot.control_dt
        state["past_joint_vel"] = truth["joint_vel"]
        quat = truth["trunk_quat"]
        return {
            "torque": truth["torques"].square().sum(-1),
            "acceleration": acceleration.square().sum(-1),
            "action_rate": state["action_rate"],
            "bounce": truth["velocity"][:, 2].square(),
            "roll": truth["gyro"][:, :2].square().sum(-1),
            # squared sine of the tilt, for small ones
            "tilt": 4.0 * (quat[:, 1].square() + quat[:, 2].square()),
            "pose": (truth["joint_pos"] - truth["joint_pos"].new_tensor(self.robot.home)).square().sum(-1),
        }


def heading(quat: Tensor) -> Tensor:
    """Where the x axis of orientations [N, 4] points over ground: [N, 2], of unit length."""
    w, x, y, z = quat.unbind(-1)
    ahead = torch.stack([1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y + w * z)], -1)
    return ahead / ahead.norm(dim=-1, keepdim=True).clamp(min=1e-6)
