"""MuJoCo's own threaded batch of simulations on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch, SimulationError
from torch import Tensor

from embodied.sim.engines import HEALTH_BITS, model_signature
from embodied.spec.registry import register

_STATE_FIELDS = ("time", "qpos", "qvel", "act", "qacc_warmstart", "ctrl", "xfrc_applied", "mocap_pos", "mocap_quat")
_KINDS = mujoco.mjtWarning
_OVERFLOWS = [int(_KINDS.mjWARN_CONTACTFULL), int(_KINDS.mjWARN_CNSTRFULL)]
_WARNINGS = [kind for kind in range(int(_KINDS.mjNWARNING)) if kind not in _OVERFLOWS]
CHUNK = 1 << 14  # rows copied at a time: resetting every world need not hold a second copy of all


@dataclass
class CpuOptions:
    """None: threads are chosen for all engines by sim.threads."""


@register("engine", "cpu", CpuOptions)
class CpuEngine:
    """MuJoCo's C engine on CPU threads (mujoco.batch), float64, deterministic at any thread count."""

    device = torch.device("cpu")

    def __init__(self, model: mujoco.MjModel, num_worlds: int, parameters: Sequence[str] = (), threads: int = 0) -> None:
        """N copies of `model`, whose fields named in `parameters` may differ between worlds."""
        # MuJoCo would reset a diverged world to its defaults and go on: it must be seen instead
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        self.model = model
        self.num_worlds = num_worlds
        self.timestep = float(model.opt.timestep)
        self.signature = model_signature("cpu", mujoco.__version__, model, parameters)
        self._batch = Batch(model, num_worlds, threads or (os.cpu_count() or 1))
        self._parameters = {name: self._batch.expand(name) for name in parameters}
        self._constant_inputs = bool(set(parameters) & set(mujoco.MjModel._setconst_inputs))
        self._bits = np.zeros(num_worlds, np.int32)
        # how often each warning was raised in a world: [N, kinds]; the live array also holds what it said last
        self._warnings = self._batch.warning[..., 1]
        self._seen = self._warnings.copy()
        self._state_size = self._batch.state.shape[1]
        self._bound: set[str] = set()
        # restored, but not yet forwarded: a reset restores, draws physics and commits, and need derive but once
        self._restored = np.zeros(num_worlds, bool)
        self._waiting = False
        self._batch.forward()
        self.default_row = self._rows(slice(1))

    def bind(self, names: Sequence[str]) -> None:
        """Have the engine keep these fields for `read`; naming them before the first step avoids an extra pass."""
        fresh = [name for name in names if name not in self._bound and name not in _STATE_FIELDS]
        for name in fresh:
            self._batch.bind(name)
        self._bound.update(fresh)
        if fresh:
            # a derived field is zero until the next call
            self._guarded(self._batch.forward)

    def read(self, name: str) -> Tensor:
        """A float32 copy [N, ...] of a MuJoCo field; see `Engine.read` for what is current."""
        self._settle()
        self.bind([name])
        return torch.from_numpy(self._batch.bind(name).astype(np.float32))

    def write(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Write a state or control field; rows that are not finite are refused and flagged."""
        if name not in _STATE_FIELDS:
            raise ValueError(f"'{name}' is not a state or control field: one of {', '.join(_STATE_FIELDS)}")
        rows = values.numpy()
        target = self._batch.bind(name)
        if mask is None and np.isfinite(rows).all():
            target[...] = rows
            return
        good = np.isfinite(rows).reshape(self.num_worlds, -1).all(1)
        wanted = np.ones(self.num_worlds, bool) if mask is None else mask.numpy()
        self._bits[wanted & ~good] |= HEALTH_BITS["bad_write"]
        ids = np.flatnonzero(wanted & good)
        target[ids] = rows[ids]

    def step(self, substeps: int) -> None:
        """Advance by `substeps`, then bring positions, velocities and their sensors up to the new state."""
        self._settle()
        self._guarded(lambda: self._batch.step(nstep=substeps, stage=mujoco.mjtStage.mjSTAGE_VEL.value))

    def forward(self, mask: Tensor | None = None) -> None:
        """Compute derived fields of the worlds of `mask`."""
        self._settle()
        ids = self._ids(mask)
        if ids is None or len(ids):
            self._guarded(lambda: self._batch.forward(ids))

    def get_state(self) -> Tensor:
        """State rows float64 [N, S]: MuJoCo's integration state, then the per-world parameters."""
        self._settle()
        return self._rows(slice(None))

    def _rows(self, worlds: slice) -> Tensor:
        blocks = [self._batch.state, *(p.reshape(self.num_worlds, -1) for p in self._parameters.values())]
        return torch.from_numpy(np.concatenate([block[worlds] for block in blocks], 1, dtype=np.float64))

    def set_state(self, rows: Tensor, mask: Tensor | None = None, index: Tensor | None = None) -> None:
        """Restore rows float64 [*, S]; rows that are not finite are refused and flagged."""
        wanted = np.arange(self.num_worlds) if mask is None else np.flatnonzero(mask.numpy())
        source = wanted if index is None else index.numpy()[wanted]
        restored = [
            self._put(wanted[start : start + CHUNK], rows.numpy()[source[start : start + CHUNK]])
            for start in range(0, len(wanted), CHUNK)
        ]
        for ids in restored:
            self._restored[ids] = True
            self._waiting |= len(ids) > 0

    def _settle(self) -> None:
        """Derive what follows from the states that were restored since."""
        if self._waiting:
            self._commit(np.flatnonzero(self._restored))

    def _put(self, worlds: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Copy rows [n, S] to n worlds, uncommitted; the ids of those whose row is finite, the others are flagged."""
        good = np.isfinite(values).all(1)
        self._bits[worlds] = np.where(good, 0, HEALTH_BITS["bad_write"])
        ids, values = worlds[good], values[good]
        self._batch.state[ids] = values[:, : self._state_size]
        start = self._state_size
        for parameter in self._parameters.values():
            size = parameter[0].size
            parameter[ids] = values[:, start : start + size].reshape(len(ids), *parameter.shape[1:])
            start += size
        return ids

    def parameters(self, name: str) -> Tensor:
        """Live per-world values of a model field, [N, ...] in the engine's dtype."""
        return torch.from_numpy(self._parameters[name])

    def commit(self, mask: Tensor | None = None) -> None:
        """Make written parameters effective and forward."""
        wanted = np.ones(self.num_worlds, bool) if mask is None else mask.numpy()
        ids = np.flatnonzero(wanted | self._restored)
        if len(ids):
            self._commit(ids)

    def _commit(self, ids: np.ndarray) -> None:
        if self._constant_inputs:
            # set_const runs at the reference pose and must not disturb the warm start, which is state
            self._batch.set_const(ids)
        self._guarded(lambda: self._batch.forward(ids))
        if self._waiting:
            # their health begins anew; all of them are among `ids`
            self._seen[self._restored] = self._warnings[self._restored]
            self._restored[:] = False
            self._waiting = False

    def health(self) -> Tensor:
        """int32 [N] of `HEALTH_BITS`, standing until the world is restored."""
        self._settle()
        fresh = self._warnings != self._seen
        if fresh.any():
            self._bits[fresh[:, _WARNINGS].any(1)] |= HEALTH_BITS["engine_warning"]
            self._bits[fresh[:, _OVERFLOWS].any(1)] |= HEALTH_BITS["overflow"]
        finite = np.isfinite(self._batch.state.sum(1))
        if not finite.all():
            self._bits[~finite] |= HEALTH_BITS["not_finite"]
        return torch.from_numpy(self._bits.copy())

    def render(self, camera: str, ids: Sequence[int], width: int, height: int) -> Tensor:
        """uint8 [n, H, W, 3] of the worlds `ids` through `camera`; creates a GL context at the first call only."""
        self._settle()
        if not hasattr(self, "_renderers"):
            self._renderers: dict[tuple[int, int], mujoco.Renderer] = {}
        renderer = self._renderers.get((width, height))
        if renderer is None:
            renderer = self._renderers[width, height] = mujoco.Renderer(self.model, height, width)
        frames = np.empty((len(ids), height, width, 3), np.uint8)
        for i, world in enumerate(ids):
            model = self._batch.get_model(world)
            data = self._batch.get_data(world)
            mujoco.mj_forward(model, data)
            renderer._model = model
            renderer.update_scene(data, camera)
            frames[i] = renderer.render()
        return torch.from_numpy(frames)

    def _ids(self, mask: Tensor | None) -> np.ndarray | None:
        return None if mask is None else np.flatnonzero(mask.numpy())

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except SimulationError as error:
            # the failing worlds keep their state, the others ran to the end
            self._bits[error.ids] |= HEALTH_BITS["engine_error"]
