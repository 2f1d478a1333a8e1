"""A simulated robot behind the same wire as a real one: one world of a task, at its own clock, with a reality of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.typing import NDArray

from embodied.sim.engines import describe_health
from embodied.spec.errors import BadInput
from embodied.spec.protocols import Engine
from embodied.spec.robot import ArmSpec

_SIZES = {"tcp_pos": 3, "tcp_quat": 4, "tcp_linvel": 3, "tcp_angvel": 3, "force": 3, "torque": 3}


@dataclass
class RealityOptions:
    """How the simulated robot differs from the nominal one that evaluation uses. Factors, but for what has a unit."""

    friction: float = 1.0
    gains: float = 1.0  # of the Cartesian impedance: stiffness and damping
    mass: float = 1.0  # of what is held
    clearance: float = 1.0
    delay: int = 0  # control steps between a command and its effect
    offset: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # constant error of the seen socket, base frame [m]
    position_noise: float = 1e-6  # sigma of the measured tool position [m]
    force_noise: float = 0.02  # sigma of each force component [N]; a tenth of it of torques [N m]
    reversed_joints: bool = False  # the robot counts its joints from the other end

    def validate(self) -> None:
        """Refuse what no robot could be.

        Raises:
            BadInput: a factor that is not positive, a negative delay or noise, an offset without three components.
        """
        for name in ("friction", "gains", "mass", "clearance"):
            if not getattr(self, name) > 0:
                raise BadInput(f"reality.{name}={getattr(self, name)}: expected a factor above 0")
        for name in ("delay", "position_noise", "force_noise"):
            if getattr(self, name) < 0:
                raise BadInput(f"reality.{name}={getattr(self, name)}: expected 0 or more")
        if len(self.offset) != 3:
            raise BadInput(f"reality.offset={self.offset}: expected three components [m]")


class SimulatedRobot:
    """`embodied.deploy.robot.Body` over one world of `engine`; every episode starts afresh, as in evaluation.

    Args:
        task: the task whose cell the robot works in.
        engine: one world of the task's model.
        reality: what differs from nominal.
        seed: of the noise; episodes have seeds of their own.
    """

    def __init__(self, task: Any, engine: Engine, reality: RealityOptions, seed: int) -> None:
        reality.validate()
        self.task, self.engine, self.reality = task, engine, reality
        self.dt = engine.timestep
        joints = task.arm.spec.joints
        self._order = list(range(len(joints)))[:: -1 if reality.reversed_joints else 1]
        damping = task.arm.spec.impedance.null_damping
        self.spec: ArmSpec = replace(
            task.arm.spec,
            joints=tuple(joints[i] for i in self._order),
            impedance=replace(task.arm.spec.impedance, null_damping=tuple(damping[i] for i in self._order)),
        )
        frames = [frame for frame in task.spec.frames if frame != "tcp"]
        self.layout: Mapping[str, int] = {
            **_SIZES,
            "joint_pos": len(joints),
            "joint_vel": len(joints),
            "target_pos": 3,
            "target_quat": 4,
            **{f"{frame}_{what}": size for frame in frames for what, size in (("pos", 3), ("quat", 4))},
        }
        engine.bind(("qpos",))
        self._all = torch.ones(1, dtype=torch.bool)
        self._noise = torch.Generator().manual_seed(seed)
        self.scene(seed)

    def scene(self, seed: int) -> None:
        """Teleport to a fresh start, drawn from `seed`."""
        generator = torch.Generator().manual_seed(seed)
        self.engine.set_state(self.task.fresh_starts(self.engine, generator), self._all)
        names = ("friction", "gains", "mass", "clearance", "delay")
        factors = {name: torch.full((1,), float(getattr(self.reality, name))) for name in names}
        self.task.set_physics(self.engine, self._all, factors)
        self._state = self.task.start(self.engine, factors, generator)
        self._state["seen_pos"] = self._state["seen_pos"] + torch.tensor([self.reality.offset])
        self._state["elapsed"] = torch.zeros(1)
        self._generator = generator
        self._pending: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self._steps, self._success = 0, False
        self._readings: dict[str, NDArray[Any]] | None = None
        self._looked: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None = None
        truth, _ = self._look()
        self._target = truth["tcp_pos"][0].clone(), truth["tcp_quat"][0].clone()

    def read(self) -> dict[str, NDArray[Any]]:
        """Readings with their noise, of the last step."""
        if self._readings is None:
            given = self._look()[1]
            seen = {name: given[name][0] for name in self.layout if name in given}
            seen["tcp_pos"] = seen["tcp_pos"] + self.reality.position_noise * self._draw()
            seen["force"] = seen["force"] + self.reality.force_noise * self._draw()
            seen["torque"] = seen["torque"] + 0.1 * self.reality.force_noise * self._draw()
            seen["joint_pos"] = self.engine.read("qpos")[0][self._order]
            seen["joint_vel"] = given["joint_vel"][0][self._order]
            seen["target_pos"], seen["target_quat"] = self._target
            self._readings = {name: value.numpy() for name, value in seen.items()}
        return self._readings

    def follow(self, pos: Any, quat: Any) -> None:
        """Take a new target pose; it has its effect after the reality's delay."""
        self._target = torch.as_tensor(pos, dtype=torch.float32), torch.as_tensor(quat, dtype=torch.float32)
        self._pending.append((self._steps + self.reality.delay * self.task.spec.robot.substeps, *self._target))
        self._readings = None

    def hold(self) -> None:
        """Keep the last target; one that is on its way still arrives, as on a robot with that delay."""

    def step(self) -> str:
        """One physics step."""
        while self._pending and self._pending[0][0] <= self._steps:
            _, pos, quat = self._pending.popleft()
            self.engine.write("ctrl", self.task.controls(pos[None], quat[None]))
        self.engine.step(1)
        self._steps += 1
        self._readings = self._looked = None
        if self._steps % self.task.spec.robot.substeps == 0:
            self._success |= bool(self.task.judge(self._look()[0], self._state)[1])
        health = int(self.engine.health()[0])
        return describe_health(health) if health else ""

    def truth(self) -> dict[str, Any]:
        """What the simulator knows: whether the task has succeeded since the scene began, and its error figures."""
        errors = self.task.errors(self._look()[0], self._state)
        return {"success": self._success, **{name: float(value[0]) for name, value in errors.items()}}

    def _look(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """True readings and seen ones, once a step and only if asked for."""
        if self._looked is None:
            self._looked = self.task.look(self.engine, self._state, self._generator)
        return self._looked

    def _draw(self) -> torch.Tensor:
        return torch.randn(3, generator=self._noise)
