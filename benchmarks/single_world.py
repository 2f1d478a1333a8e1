"""task=assembly as one gymnasium environment in numpy, as a user of one process a world would write it (for peers.py).

The same cell, observation, action, success and reset bank as `embodied.sim.tasks.assembly`; physics is nominal, the socket is
seen where it is, and sensors are as `mj_step` leaves them: whatever could slow it down is left out.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import mujoco
import numpy as np

from embodied.commands.build import load_bank, make_task
from embodied.spec.observe import command, observe, start_memory, succeeded
from embodied.spec.rotations import quat_conjugate, quat_multiply, quat_to_rotvec, rotate_inverse


class SingleWorld(gym.Env):
    """One world of the task that a composed configuration describes."""

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        from embodied.sim.robots.arm import REFERENCE_QUAT

        self.task = make_task(config)
        self.spec, self.model = self.task.spec, self.task.model
        self.data = mujoco.MjData(self.model)
        self._state = mujoco.mjtState.mjSTATE_INTEGRATION
        size = mujoco.mj_stateSize(self.model, self._state)
        self._rows = load_bank(config, self.task, print).rows[:, :size].numpy()
        self._rng = np.random.default_rng(seed)
        self._reference = np.array([REFERENCE_QUAT])
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (self.spec.obs_size,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (self.spec.action.size,), np.float32)

    def _readings(self) -> dict[str, np.ndarray]:
        readings = {name: self.data.sensordata[None, where].copy() for name, where in self.task.sensors.items()}
        readings["force"], readings["torque"] = -readings["force"], -readings["torque"]
        readings["socket_pos"], readings["socket_quat"] = self._socket
        return readings

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start from a configuration drawn uniformly from the bank."""
        mujoco.mj_setState(self.model, self.data, self._rows[self._rng.integers(len(self._rows))], self._state)
        mujoco.mj_forward(self.model, self.data)
        self._socket = self.data.mocap_pos[:1].copy(), quat_multiply(self.data.mocap_quat[:1], self._reference)
        self._seen = self._readings()
        self._memory = start_memory(self.spec, self._seen)
        self._steps = self._held = 0
        return self._observation(), {}

    def _observation(self) -> np.ndarray:
        return observe(self.spec, self._seen, self._memory)[0].astype(np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One control step."""
        self._memory = command(self.spec, action[None].astype(np.float64), self._seen, self._memory)
        turn = quat_to_rotvec(quat_multiply(quat_conjugate(self._reference), self._memory["target_quat"]))
        self.data.ctrl[:] = np.concatenate([rotate_inverse(self._reference, self._memory["target_pos"]), turn], -1)[0]
        mujoco.mj_step(self.model, self.data, nstep=self.task.spec.robot.substeps)
        self._seen = self._readings()
        self._steps += 1
        self._held = self._held + 1 if succeeded(self.spec.success, self._seen)[0] else 0
        success = self._held >= self.spec.success.steps
        failure = self._steps >= self.task.spec.max_steps
        return self._observation(), 1.0 * success - 0.01 * failure, bool(success or failure), False, {}
