"""Reach a goal over any of 13 kinds of terrain: one policy, one reward, success that ends the episode.

A configuration is a kind of terrain, a level, a start and a goal, as in the locomotion benchmark of success-guided resets
(arXiv 2610.12465). All tiles are one map of one model. The goal is a mocap body: its place is part of a state row, so that a
reset restores it with the robot, and pictures show it.

Frames. Heading: its origin under the trunk's, x where the trunk's x axis points over ground, z up.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields

import mujoco
import torch
from torch import Tensor

from embodied.sim.resets import ResetBank, content_hash
from embodied.sim.robots import check_kind
from embodied.sim.robots.legged import Legged
from embodied.sim.robots.shapes import VISUAL
from embodied.sim.tasks import symmetry
from embodied.sim.tasks.checks import check_episode, check_options
from embodied.sim.tasks.physics import noisy
from embodied.sim.tasks.terrains import KINDS, LEVELS, Pairs, height_at, make_map, sample_pairs
from embodied.sim.tasks.walker import (
    Walker,
    WalkerBankOptions,
    WalkerRandomiseOptions,
    check_randomise,
    heading,
    joint_targets,
    proprioception,
)
from embodied.spec.observe import observe, start_memory
from embodied.spec.policy import PolicySpec, Term
from embodied.spec.protocols import Engine, Obs
from embodied.spec.registry import register

BANK_SEED = 20261130  # every run of the same task starts from the same bank
VERSION = 1  # of the distribution of starts: part of a bank's content hash

SCAN = ((-0.3, 0.9, 11), (-0.36, 0.36, 7))
"""The scan of the ground along x and y of the heading frame: from, to [m], points."""
FAR = 2.0  # the policy is not told how much farther than this the goal is [m]
DEEP = -0.2  # a foot this low is in a hole up to the knee: ground to walk on is at 0 or above [m]
NOISE = {"heights": 0.02, "offset": 0.05}
"""Sigma of what the policy is told of the ground, each point and each step, and of where the goal is [m]."""


@dataclass
class TraverseRewardOptions:
    """What an episode's end is worth, and a control step: the paper's +50 and -50, progress and a trot, less weighted efforts.

    Progress is there because goals lie 2 m away or farther, where chance does not lead: it telescopes to at most the distance
    gained, so that no detour earns more. Efforts are those of the task `locomotion`, at lower weights, since stairs and slopes
    ask for bouncing, rolling and tilting.
    """

    success: float = 50.0  # once
    failure: float = 50.0  # once: a fall, the void, or the time limit
    progress: float = 5.0  # by the speed of approach [m/s], at most `cap`
    cap: float = 1.0  # of the speed of approach that is rewarded [m/s]
    trot: float = 0.5  # see `Walker.trot`
    torque: float = 1e-5
    acceleration: float = 1e-7
    action_rate: float = 0.005
    bounce: float = 0.1
    roll: float = 0.005
    tilt: float = 0.1
    pose: float = 0.02


@dataclass
class TraverseOptions:
    """Options of the task `traverse`."""

    terrain: list[str] = field(default_factory=lambda: list(KINDS))  # kinds
    levels: list[int] = field(default_factory=lambda: list(range(LEVELS)))  # 0 (easy) to 9
    variants: int = 2  # tiles of each kind and level to train on; evaluation has one more
    seed: int = 0  # of the map
    bank: WalkerBankOptions = field(default_factory=lambda: WalkerBankOptions(8320))  # spread evenly over tiles
    episode_s: float = 15.0
    reach: float = 0.3  # horizontal distance of the trunk from the goal that counts as there [m]
    hold_steps: int = 5  # control steps in a row that it must be there, on its feet
    randomise: WalkerRandomiseOptions = field(default_factory=WalkerRandomiseOptions)
    reward: TraverseRewardOptions = field(default_factory=TraverseRewardOptions)


def check(options: TraverseOptions) -> None:
    """Refuse options that no world could be built from; `make_map` refuses impossible terrain.

    Raises:
        BadInput: an impossible value.
    """
    tiles = len(options.terrain) * len(options.levels) * options.variants
    check_episode("episode_s", options.episode_s, 1.0)
    check_options(
        options,
        (
            ("variants", options.variants >= 1, "at least 1 tile of each kind and level"),
            ("reach", 0 < options.reach < 1, "more than 0 and less than 1 m: goals are 2 m away or farther"),
            ("hold_steps", options.hold_steps >= 1, "at least 1"),
            ("bank.size", options.bank.size >= tiles, f"at least {tiles}, one for each tile of terrain x levels x variants"),
            ("reward.cap", options.reward.cap > 0, "more than 0 m/s"),
        ),
    )
    check_randomise(options.randomise)


def scan_grid() -> Tensor:
    """Points of the scan in the heading frame, x then y [m], float32 [77, 2]: from behind to ahead, each row right to left."""
    x, y = (torch.linspace(first, last, count) for first, last, count in SCAN)
    return torch.cartesian_prod(x, y)


def policy_spec(legged: Legged, options: TraverseOptions) -> PolicySpec:
    """What the policy of this task sees and commands on `legged`. The request is where the goal lies in the heading frame:
    direction (x, y), and the distance [m], at most `FAR`.
    """
    trunk = legged.spec.trunk
    terms = (
        *proprioception(trunk),
        Term("goal", "request", "1, 1, m", 1.0, of=trunk, count=3),
        Term("ground", "heights", "m", 0.25, of=trunk, clip=3.0, count=len(scan_grid())),
    )
    return PolicySpec("traverse", legged.spec, terms, joint_targets(legged), None, options.episode_s)


def add_goal(spec: mujoco.MjSpec, reach: float) -> None:
    """A disc of radius `reach` [m] where the goal is: the mocap body `goal`, which touches nothing."""
    goal = spec.worldbody.add_body(name="goal", mocap=True)
    disc = {"type": mujoco.mjtGeom.mjGEOM_CYLINDER, "size": [reach, 0.01, 0], "rgba": [0.1, 0.7, 0.3, 0.6]}
    goal.add_geom(name="goal", **disc, **VISUAL)
    # that of a map is so large that a camera on a robot would see nothing
    spec.stat.extent = 8.0


USUAL = {
    "robot": "go1",
    "sampler": "locomotion",
    # physics on a height field is slow: learn more from each step
    "sim.num_worlds": 512,
    "algo.epochs": 6,
    "policy.init_std": 0.3,
    "algo.entropy": 0.0,
    "algo.desired_kl": 0.03,
    "algo.symmetry": True,
    "eval.every": 40,
}


@register("task", "traverse", TraverseOptions, USUAL)
class Traverse:
    """Walk to a goal over slopes, stairs, gaps, stones, beams and mazes, by joint position targets and a scan of the ground.

    The map has `variants` + 1 tiles of each kind and level: the training bank starts in the first ones, fresh starts in the
    last one, which no training sees. (Kinds that leave nothing to chance, such as stairs, look alike in all.)
    """

    validate = staticmethod(check)
    name = "traverse"
    parameters = Walker.parameters
    fields = Walker.fields
    time_limit_fails = True
    rest_action = 0.0

    def __init__(self, options: TraverseOptions, legged: Legged) -> None:
        check(options)
        check_kind(self.name, legged, Legged, "go1")
        self.options, self.legged = options, legged
        self.map = make_map(options.terrain, options.levels, options.variants + 1, options.seed)
        self.spec = policy_spec(legged, options)
        self.walker = Walker(legged, self.map.ground, options.randomise, lambda spec: add_goal(spec, options.reach))
        self.model = self.walker.model
        self.grid = scan_grid()
        self.failure_cost = options.reward.failure
        self.training_steps = self.spec.max_steps
        self.bank_size = options.bank.size
        rows, width = (count for _, _, count in SCAN)
        privileged = (*self.walker.mirror, ([0, 1, 2], [1.0] * 3))
        self.mirror = symmetry.mirror(legged, self.spec, symmetry.ARROW, privileged, symmetry.scan(rows, width))
        self.obs_sizes = {group: len(self.mirror[group][0]) for group in ("policy", "critic")}

    # -- an episode --------------------------------------------------------------------------------------------------

    def randomise(self, engine: Engine, mask: Tensor, generator: torch.Generator, on: bool) -> dict[str, Tensor]:
        """See `Walker.randomise`."""
        return self.walker.randomise(engine, mask, generator, on)

    def start(self, engine: Engine, factors: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Goal, memory and gait of new episodes, of every world."""
        self.grid = self.grid.to(engine.device)
        truth = self.walker.truth(engine)
        state = start_memory(self.spec, truth) | self.walker.start(truth)
        state |= {f"factor/{name}": value for name, value in factors.items()}
        state["goal"] = engine.read("mocap_pos")[:, 0, :2]
        state["distance"] = (state["goal"] - truth["trunk_pos"][:, :2]).norm(dim=-1)
        state["held"] = torch.zeros_like(state["distance"])
        return state

    def command(self, engine: Engine, action: Tensor, state: dict[str, Tensor], readings: dict[str, Tensor]) -> None:
        """Turn an action [N, A] into joint targets."""
        self.walker.command(self.spec, engine, action, state, readings)

    def disturb(self, engine: Engine, state: dict[str, Tensor], generator: torch.Generator) -> None:
        """In training, pushes."""
        self.walker.push(engine, state, generator)

    def look(
        self, engine: Engine, state: dict[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """True readings, and the noisy ones that the policy gets."""
        truth = self.walker.truth(engine)
        pos, ahead = truth["trunk_pos"], heading(truth["trunk_quat"])
        truth["offset"], truth["heights"] = state["goal"] - pos[:, :2], self.scan(pos, ahead)
        truth["distance"] = truth["offset"].norm(dim=-1)
        seen = noisy(self.walker.noisy(truth, generator), NOISE, generator)
        for readings in (truth, seen):
            readings["request"] = request(readings["offset"], ahead)
        return truth, seen

    def scan(self, pos: Tensor, ahead: Tensor) -> Tensor:
        """Ground under the points of the scan, from the height of the trunk: [N, 77] m.

        Args:
            pos: of the trunk [N, 3] m.
            ahead: the heading [N, 2], of unit length.
        """
        # the heading frame's y axis is x turned left
        left = torch.stack([-ahead[:, 1], ahead[:, 0]], -1)
        points = pos[:, None, :2] + self.grid @ torch.stack([ahead, left], 1)
        return height_at(self.walker.ground, points) - pos[:, 2:]

    def observe(self, truth: dict[str, Tensor], seen: dict[str, Tensor], state: dict[str, Tensor]) -> Obs:
        """Observation groups; the critic also has `Walker.privileged`, the whole distance, how long it holds, and the time."""
        shares = [truth["distance"] / 3.0, state["held"] / self.options.hold_steps, state["elapsed"]]
        privileged = [*self.walker.privileged(truth, state), torch.stack(shares, -1)]
        critic = torch.cat([observe(self.spec, truth, state), *privileged], -1)
        return {"policy": observe(self.spec, seen, state), "critic": critic}

    def judge(self, truth: dict[str, Tensor], state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Reward [N], success and failure bool [N]; advances `held` and `distance`."""
        weights, distance = self.options.reward, truth["distance"]
        deep = (truth["trunk_pos"][:, 2] < 0) | (truth["feet"][..., 2].amin(-1) < DEEP)
        failure = self.walker.fallen(truth) | deep
        there = (distance < self.options.reach) & ~failure
        state["held"] = torch.where(there, state["held"] + 1.0, 0.0)
        success = state["held"] >= self.options.hold_steps
        approach = (state["distance"] - distance) / self.legged.spec.control_dt
        state["distance"] = distance
        reward = weights.success * success + weights.progress * approach.clamp(max=weights.cap)
        reward = reward + weights.trot * self.walker.trot(truth, state)
        for name, effort in self.walker.efforts(truth, state).items():
            reward = reward - getattr(weights, name) * effort
        return reward, success, failure

    def errors(self, truth: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Distance from the goal now [m], power of the motors [W], each [N]."""
        return {"distance_m": truth["distance"], "power_w": self.walker.power(truth)}

    # -- where episodes start ----------------------------------------------------------------------------------------

    def tile_of(self, xy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tile that each place xy [N, 2] m is in: its kind and variant by index, its level by number, int64 [N] each."""
        shape = self.map.tiles.shape
        tile = torch.cdist(xy.cpu(), self.map.tiles.view(-1, 2)).argmin(-1)
        levels = torch.tensor(self.map.levels)[tile // shape[2] % shape[1]]
        return tile // (shape[1] * shape[2]), levels, tile % shape[2]

    def bank_hash(self, signature: str) -> str:
        """The content hash of this task's bank on the engine of that signature."""
        names = ("terrain", "levels", "variants", "seed", "bank")
        kept = {name: asdict(self.options)[name] for name in names}
        return content_hash({"version": VERSION, "signature": signature, "options": kept})

    def make_bank(self, engine: Engine) -> ResetBank:
        """The training bank: tags are kinds, difficulty is the level; the engine's worlds are used up."""
        generator = torch.Generator().manual_seed(BANK_SEED)
        count = engine.num_worlds
        pairs = self.draw(count * math.ceil(self.bank_size / count), generator, fresh=False)
        rows = [
            self.place(engine, _pick(pairs, slice(start, start + count)), generator).cpu()
            for start in range(0, len(pairs.kind), count)
        ]
        kept = _pick(pairs, slice(self.bank_size))
        levels = torch.tensor(self.map.levels, dtype=torch.float64)[kept.level]
        key = self.bank_hash(engine.signature)
        return ResetBank(torch.cat(rows)[: self.bank_size], kept.kind, self.map.kinds, engine.signature, key, levels)

    def fresh_starts(self, engine: Engine, generator: torch.Generator) -> Tensor:
        """Rows [N, S] of starts and goals in tiles that the training bank has none in."""
        return self.place(engine, self.draw(engine.num_worlds, generator, fresh=True), generator)

    def draw(self, count: int, generator: torch.Generator, fresh: bool) -> Pairs:
        """`count` starts and goals, every tile as often as any other, in rounds of one random order.

        Args:
            count: how many.
            generator: on the CPU.
            fresh: in the tiles kept for evaluation, else in those trained on.
        """
        kinds, levels, variants = self.map.tiles.shape[:3]
        rounds = math.ceil(count / (kinds * levels * (1 if fresh else variants - 1)))
        pairs = sample_pairs(self.map, rounds * kinds * levels * variants, generator)
        ours = (pairs.variant == variants - 1) == fresh
        ids = torch.nonzero(ours)[:, 0].view(rounds, -1)
        order = torch.randperm(ids.shape[1], generator=generator)
        return _pick(pairs, ids[:, order].flatten()[:count])

    def place(self, engine: Engine, pairs: Pairs, generator: torch.Generator) -> Tensor:
        """Rows [N, S], one for each pair: a robot at rest near its rest pose, turned anyhow, its feet just above the ground."""
        count, robot = engine.num_worlds, self.legged.spec
        signed = 2.0 * torch.rand(count, 1 + len(robot.joints), generator=generator, dtype=torch.float64) - 1.0
        half, flat = math.pi / 2 * signed[:, 0], torch.zeros(count, 2, dtype=torch.float64)
        quat = torch.cat([half.cos()[:, None], flat, half.sin()[:, None]], -1)
        start, goal = pairs.start.double(), pairs.goal.double()
        joints = torch.tensor(robot.home, dtype=torch.float64) + 0.05 * signed[:, 1:]
        self.walker.place(engine, start, quat, joints, 0.01)
        goal = torch.cat([goal, height_at(self.map.ground, goal[:, None])], -1)
        engine.write("mocap_pos", goal[:, None].to(engine.device))
        return engine.get_state()


def request(offset: Tensor, ahead: Tensor) -> Tensor:
    """Direction of a goal in the heading frame (x, y) and its distance, at most `FAR`: [N, 3].

    Args:
        offset: from the trunk to the goal, in the world [N, 2] m. Within 0.1 m of it the direction shrinks to nothing.
        ahead: the heading [N, 2].
    """
    distance = offset.norm(dim=-1, keepdim=True)
    across = ahead[:, :1] * offset[:, 1:] - ahead[:, 1:] * offset[:, :1]
    along = (ahead * offset).sum(-1, keepdim=True)
    return torch.cat([torch.cat([along, across], -1) / distance.clamp(min=0.1), distance.clamp(max=FAR)], -1)


def _pick(pairs: Pairs, which: Tensor | slice) -> Pairs:
    """Some of the pairs."""
    return Pairs(*(getattr(pairs, item.name)[which] for item in fields(pairs)))
