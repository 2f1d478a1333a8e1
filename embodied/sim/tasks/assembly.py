"""Insert a held part into a socket with sub-millimetre clearance, from nothing but success and failure.

Frames. `socket` has its origin in the centre of the socket's mouth and z into the hole, so that it coincides in orientation
with the tool's frame (`tcp`, at the part's tip, z out of the hand) when the part is inserted. The policy sees it with a bias
drawn an episode and noise drawn a step; the critic sees the truth.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embodied.sim.resets import ResetBank
from embodied.sim.robots import check_kind
from embodied.sim.robots.arm import REFERENCE_QUAT, Arm
from embodied.sim.tasks import assembly_starts
from embodied.sim.tasks.assembly_options import AssemblyOptions, check
from embodied.sim.tasks.assembly_script import insert
from embodied.sim.tasks.cell import CENTRE, MOUTH_HEIGHT, build_cell
from embodied.sim.tasks.parts import PARTS
from embodied.sim.tasks.physics import put
from embodied.spec.observe import command, observe, start_memory, succeeded, turn_about_z
from embodied.spec.policy import PolicySpec, SuccessSpec, Term, ToolMotion, of_arm
from embodied.spec.protocols import Engine, Obs
from embodied.spec.registry import register
from embodied.spec.rotations import quat_conjugate, quat_multiply, quat_to_rotvec, rotate_inverse, rotvec_to_quat

CRITIC_EXTRA = 17  # privileged numbers beside the policy's terms, see `Assembly.observe`


def policy_spec(arm: Arm, options: AssemblyOptions | None = None) -> PolicySpec:
    """What the policy of this task sees and commands on `arm`, and what ends its episodes."""
    options = options or AssemblyOptions()
    part = PARTS[options.part]
    terms = (
        Term("tip position", "position", "m", 0.05, frame="socket"),
        Term("tip position, fine", "position", "m", 0.004, frame="socket", clip=1.5),
        Term("tip rotation", "rotation", "rad", 0.2, frame="socket"),
        Term("tip velocity", "linear_velocity", "m/s", 0.1, frame="socket"),
        Term("tip angular velocity", "angular_velocity", "rad/s", 0.5, frame="socket"),
        Term("wrist force", "force", "N", 10.0, frame="socket", clip=3.0),
        Term("wrist torque", "torque", "N m", 1.0, frame="socket", clip=3.0),
        Term("target lead", "target_position", "m", 0.01, frame="socket"),
        Term("target turn", "target_rotation", "rad", 0.05, frame="socket"),
        Term("last action", "last_action", "1", 1.0),
        *part.terms,
    )
    success = SuccessSpec(
        "tcp",
        "socket",
        depth=part.depth if options.success_depth is None else options.success_depth,
        lateral=part.lateral,
        tilt=math.radians(options.success_tilt),
        steps=options.success_steps,
        turn=part.turn,
    )
    action = ToolMotion("socket", translation=0.004, rotation=0.012)
    episode_s = part.episode_s if options.episode_s is None else options.episode_s
    return PolicySpec("assembly", arm.spec, terms, action, success, episode_s)


@register("task", "assembly", AssemblyOptions)
class Assembly:
    """Put a held part into its socket with tenths of a millimetre of clearance, by sparse reward: a peg, a rod, a bayonet."""

    validate = staticmethod(check)
    name = "assembly"
    parameters = ("pair_friction", "actuator_gainprm", "actuator_biasprm", "body_mass", "body_inertia", "geom_pos")
    tag_names: tuple[str, ...] = ("inserted", "near", "far")
    fields = ("sensordata", "qvel")
    mirror = None
    time_limit_fails = True
    rest_action = 0.0

    def __init__(self, options: AssemblyOptions, arm: Arm) -> None:
        check(options)
        check_kind(self.name, arm, Arm, "franka")
        self.options, self.arm = options, arm
        self.part = PARTS[options.part]
        self.spec = policy_spec(arm, options)
        _, self.success = of_arm(self.spec)
        self.failure_cost = options.reward.failure
        self.training_steps = self.spec.max_steps
        self.bank_size = options.bank.size
        self.obs_sizes = {"policy": self.spec.obs_size, "critic": self.spec.obs_size + CRITIC_EXTRA}
        self.model = build_cell(arm, self.part, options.clearance).compile()
        self.sensors = {
            self.model.sensor(i).name: slice(self.model.sensor_adr[i], self.model.sensor_adr[i] + self.model.sensor_dim[i])
            for i in range(self.model.nsensor)
        }
        # the shapes that move with the clearance, and what lies between them
        moves = {self.model.geom(shape.name).id: shape.grows for shape in self.part.socket(options.clearance)}
        growing = [geom for geom, grows in moves.items() if any(grows)]
        walls = range(min(growing), max(growing) + 1)
        self._grows = torch.tensor([moves[geom] for geom in walls], dtype=torch.float64)
        held, every = self.model.body("tool").id, slice(None)
        knobs = {
            "friction": ("pair_friction", (every, slice(0, 2))),
            "gains stiffness": ("actuator_gainprm", (every, 0)),
            "gains bias": ("actuator_biasprm", (every, slice(1, 3))),
            "mass": ("body_mass", (held,)),
            "mass inertia": ("body_inertia", (held,)),
            "clearance": ("geom_pos", (slice(walls.start, walls.stop), slice(0, 2))),
        }
        self._knobs = {
            name: (key, where, torch.tensor(getattr(self.model, key)[where])) for name, (key, where) in knobs.items()
        }

    # -- worlds ------------------------------------------------------------------------------------------------------

    def randomise(self, engine: Engine, mask: Tensor, generator: torch.Generator, on: bool) -> dict[str, Tensor]:
        """Draw the physics of the worlds of `mask` from nominal (`on` false: set nominal) and commit them.

        Returns:
            Per-world factors [N] of friction, gains, mass, clearance, and delay in control steps [N].
        """
        ranges, count = self.options.randomise, engine.num_worlds

        def draw(low_high: list[float]) -> Tensor:
            uniform = torch.rand(count, generator=generator, device=engine.device)
            return low_high[0] + (low_high[1] - low_high[0]) * uniform

        factors = {name: draw(getattr(ranges, name)) for name in ("friction", "gains", "mass", "clearance")}
        factors["delay"] = (torch.rand(count, generator=generator, device=engine.device) < ranges.delay).float()
        if not on:
            factors = {name: torch.full_like(f, 0.0 if name == "delay" else 1.0) for name, f in factors.items()}
        self.set_physics(engine, mask, factors)
        return factors

    def set_physics(self, engine: Engine, mask: Tensor, factors: dict[str, Tensor]) -> None:
        """Give the worlds of `mask` their factors [N] of friction, gains, mass and clearance, and commit them."""
        for name, (model_field, where, nominal) in self._knobs.items():
            nominal = nominal.to(engine.device)
            factor = factors[name.split()[0]].to(nominal.dtype).view(-1, *[1] * nominal.ndim)
            if model_field == "geom_pos":
                values = nominal + (factor - 1.0) * self.options.clearance * self._grows.to(engine.device)
            else:
                values = nominal * factor
            put(engine, model_field, where, values, mask)
        engine.commit(mask)

    # -- an episode --------------------------------------------------------------------------------------------------

    def start(self, engine: Engine, factors: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """The task's own state at an episode's beginning, for every world; the caller keeps the rows it needs."""
        count, device = engine.num_worlds, engine.device
        socket_quat = quat_multiply(
            engine.read("mocap_quat")[:, 0], torch.tensor(REFERENCE_QUAT, device=device).expand(count, 4)
        )
        state = {f"factor/{name}": value for name, value in factors.items()}
        state["socket_pos"], state["socket_quat"] = engine.read("mocap_pos")[:, 0], socket_quat
        state["bias_pos"] = self.options.pose_bias * torch.randn(count, 3, generator=generator, device=device)
        yaw = math.radians(self.options.yaw_bias) * torch.randn(count, 1, generator=generator, device=device)
        state["bias_yaw"] = torch.cat([torch.zeros(count, 2, device=device), yaw], -1)
        state["seen_pos"], state["seen_quat"] = self._estimate(state)
        state["held"] = torch.zeros(count, device=device)
        truth = self._truth(engine, state)
        state.update(start_memory(self.spec, truth))
        state["action_rate"] = torch.zeros(count, device=device)
        state["sent_pos"], state["sent_quat"] = truth["tcp_pos"], truth["tcp_quat"]
        return state

    def command(self, engine: Engine, action: Tensor, state: dict[str, Tensor], readings: dict[str, Tensor]) -> None:
        """Turn an action [N, A] into controls, one control step late where the world's delay says so."""
        memory = command(self.spec, action, readings, state)
        late = state["factor/delay"][:, None] > 0.5
        pos = torch.where(late, state["sent_pos"], memory["target_pos"])
        quat = torch.where(late, state["sent_quat"], memory["target_quat"])
        state["sent_pos"], state["sent_quat"] = memory["target_pos"], memory["target_quat"]
        state["action_rate"] = (memory["last_action"] - state["last_action"]).square().sum(-1)
        state.update(memory)
        engine.write("ctrl", self.controls(pos, quat))

    def script(self, engine: Engine, state: dict[str, Tensor]) -> Tensor:
        """Actions [N, A] of a script that sees the socket as a policy does; see `assembly_script.insert`."""
        seen = {"socket_pos": state["seen_pos"], "socket_quat": state["seen_quat"]}
        return insert(self.spec, self._truth(engine, state) | seen, state)

    def disturb(self, engine: Engine, state: dict[str, Tensor], generator: torch.Generator) -> None:
        """Nothing befalls a cell."""

    def controls(self, pos: Tensor, quat: Tensor) -> Tensor:
        """Actuator controls [N, 6] for a tool pose: position and rotation vector relative to the reference site."""
        reference = torch.tensor(REFERENCE_QUAT, dtype=pos.dtype, device=pos.device).expand(pos.shape[0], 4)
        turn = quat_to_rotvec(quat_multiply(quat_conjugate(reference), quat))
        return torch.cat([rotate_inverse(reference, pos), turn], -1)

    def _truth(self, engine: Engine, state: dict[str, Tensor]) -> dict[str, Tensor]:
        data = engine.read("sensordata")
        readings = {name: data[:, where] for name, where in self.sensors.items()}
        # MuJoCo reports what the tool does to the hand's other side: the environment's push is its opposite
        readings["force"], readings["torque"] = -readings["force"], -readings["torque"]
        readings["socket_pos"], readings["socket_quat"] = state["socket_pos"], state["socket_quat"]
        readings["joint_vel"] = engine.read("qvel")
        return readings

    def _estimate(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The socket's pose as an episode's calibration gives it to the policy."""
        pos, quat = state["socket_pos"], state["socket_quat"]
        if self.options.see_socket:
            return pos + state["bias_pos"], quat_multiply(quat, rotvec_to_quat(state["bias_yaw"]))
        return pos.new_tensor([*CENTRE, MOUTH_HEIGHT]).expand_as(pos), quat.new_tensor(REFERENCE_QUAT).expand_as(quat)

    def look(
        self, engine: Engine, state: dict[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """True readings, and the readings that the policy gets."""
        truth = self._truth(engine, state)
        noise = self.options.pose_noise * torch.randn(engine.num_worlds, 3, generator=generator, device=engine.device)
        seen = dict(truth)
        seen["socket_pos"], seen["socket_quat"] = state["seen_pos"] + noise, state["seen_quat"]
        return truth, seen

    def observe(self, truth: dict[str, Tensor], seen: dict[str, Tensor], state: dict[str, Tensor]) -> Obs:
        """Observation groups: what the policy sees, and the critic's privileged view."""
        pos = rotate_inverse(truth["socket_quat"], truth["tcp_pos"] - truth["socket_pos"])
        privileged = [
            (pos / 0.004).clamp(-1.5, 1.5),
            (pos / 0.0005)[:, :2].clamp(-2.0, 2.0),
            rotate_inverse(truth["socket_quat"], state["bias_pos"]) / 0.001,
            state["bias_yaw"][:, 2:] / 0.01,
            truth["contact"] / 0.0003,
            state["held"][:, None] / self.options.success_steps,
            state["elapsed"][:, None],
            torch.stack([state[f"factor/{name}"] for name in ("friction", "gains", "mass", "clearance", "delay")], -1),
        ]
        return {
            "policy": observe(self.spec, seen, state),
            "critic": torch.cat([observe(self.spec, truth, state), *privileged], -1),
        }

    def judge(self, truth: dict[str, Tensor], state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Reward [N], success and failure bool [N] of the step that led here; advances `held`."""
        options = self.options
        pos = rotate_inverse(truth["socket_quat"], truth["tcp_pos"] - truth["socket_pos"])
        good = succeeded(self.success, truth) & (truth["contact"][:, 0] > -options.success_penetration)
        state["held"] = torch.where(good, state["held"] + 1.0, torch.zeros_like(state["held"]))
        success = state["held"] >= options.success_steps
        failure = pos.norm(dim=-1) > options.stray_distance
        reward = (
            options.reward.success * success
            - options.reward.action * state["last_action"].square().sum(-1)
            - options.reward.action_rate * state["action_rate"]
            - options.reward.joint_velocity * truth["joint_vel"].square().sum(-1)
        )
        return reward, success, failure

    def errors(self, truth: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The task's own error figures, [N]: insertion depth [m] and, where success takes a turn, the turn [rad]."""
        pos = rotate_inverse(truth["socket_quat"], truth["tcp_pos"] - truth["socket_pos"])
        if self.part.turn is None:
            return {"depth_m": pos[:, 2]}
        return {
            "depth_m": pos[:, 2],
            "turn_rad": turn_about_z(quat_multiply(quat_conjugate(truth["socket_quat"]), truth["tcp_quat"])),
        }

    # -- where episodes start ----------------------------------------------------------------------------------------

    def bank_hash(self, signature: str) -> str:
        """The content hash of this task's bank on the engine of that signature."""
        return assembly_starts.bank_hash(self, signature)

    def make_bank(self, engine: Engine) -> ResetBank:
        """The training bank; the engine's worlds are used up."""
        return assembly_starts.make_bank(self, engine)

    def fresh_starts(self, engine: Engine, generator: torch.Generator) -> Tensor:
        """Rows [N, S] of starts at least 30 mm from the mouth, for evaluation."""
        return assembly_starts.starts(self, engine, "far", engine.num_worlds, generator)
