"""MuJoCo Warp: the same models on a GPU, in float32, with masks in place of ids.

Nothing in the methods that run every step reads from the device: arrays are allocated once, torch sees them without a
copy, and whatever goes to some worlds only is chosen with `torch.where`. A forward pass computes every world, so that
`read` answers from copies, which change in the worlds of the mask alone.

Unlike the CPU engine's, results are not promised to repeat bit by bit on a GPU: sums are taken in any order there.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied.sim.engines import HEALTH_BITS, model_signature
from embodied.spec.errors import BadInput
from embodied.spec.registry import register

_STATE_FIELDS = ("time", "qpos", "qvel", "act", "history", "qacc_warmstart", "ctrl", "qfrc_applied", "xfrc_applied",
                 "eq_active", "mocap_pos", "mocap_quat", "userdata")  # fmt: skip
"""What a state row holds, in the order of MuJoCo's mjSTATE_INTEGRATION; then come parameters, as they were named."""

_WRITABLE = tuple(name for name in _STATE_FIELDS if name not in ("history", "userdata", "eq_active"))
_CONSTANTS = ("body_subtreemass", "body_invweight0", "dof_invweight0", "actuator_acc0", "geom_aabb", "geom_rbound",
              "tendon_length0", "tendon_invweight0", "eq_data")  # fmt: skip
"""Model fields that mujoco_warp.set_const derives from others; they differ between worlds where their sources do."""

_CONTACTS = 48  # room for contacts: the mean over worlds of what one may have, the room is shared
_CONSTRAINTS = 128  # rows of constraints that any one world may have; a contact with friction takes four


@dataclass
class WarpOptions:
    """None: room for contacts and constraints is fixed, and running out of it shows as `overflow`."""


@register("engine", "warp", WarpOptions)
class WarpEngine:
    """MuJoCo Warp on a CUDA GPU, float32; without one on Warp's CPU device, slowly, to compare engines."""

    def __init__(self, model: mujoco.MjModel, num_worlds: int, parameters: Sequence[str] = (), threads: int = 0) -> None:
        """N copies of `model`, whose fields named in `parameters` may differ between worlds; `threads` is not used.

        Raises:
            BadInput: mujoco_warp is not installed, or cannot simulate this model or vary these fields.
        """
        try:
            import mujoco_warp
            import warp
        except ImportError:
            raise BadInput("engine 'warp' needs mujoco_warp, which is not installed: install embodied[gpu]") from None
        warp.config.log_level = max(warp.config.log_level, warp.LOG_WARNING)
        warp.init()
        self._mjw, self._wp = mujoco_warp, warp
        self.device = torch.device("cpu")
        if torch.cuda.is_available() and warp.is_cuda_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._on = warp.device_from_torch(self.device)
        self.model = copy.copy(model)
        # Warp never resets a diverged world, and refuses the flag that says so
        self.model.opt.disableflags &= ~int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
        # with it Warp collides boxes as C does, with up to 8 contacts; without, by a convex collider with up to 4. Of
        # 314 jammed pegs, 9 in 10 then accelerate within 0.7 % of what C says; without, within 5 %
        self.model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_NATIVECCD)
        self.num_worlds = num_worlds
        self.timestep = float(model.opt.timestep)
        self.signature = model_signature("warp", mujoco_warp.__version__, self.model, parameters)
        self._has_constants = bool(set(parameters) & set(mujoco.MjModel._setconst_inputs))
        varied = dict.fromkeys((*parameters, *(_CONSTANTS if self._has_constants else ())), num_worlds)
        with warp.ScopedDevice(self._on):
            try:
                self._m = mujoco_warp.put_model(self.model, batch_sizes=varied)
            except (NotImplementedError, ValueError) as error:
                raise BadInput(f"engine 'warp' cannot simulate this model ({error}): use the engine 'cpu'") from None
            self._m.opt.warn_overflow = 0  # `health` tells
            if self._on.is_cuda:
                self._m.opt.graph_conditional = warp.is_conditional_graph_supported()
            self._d = mujoco_warp.make_data(self.model, num_worlds, nconmax=_CONTACTS, njmax=_CONSTRAINTS)
            self._last_sensordata = warp.zeros_like(self._d.sensordata)
        self._reference = mujoco.MjData(self.model)
        self._graphs: dict[Hashable, Any] = {}
        self._state = {name: self._view(self._d, self._reference, name) for name in _STATE_FIELDS}
        self._parameters = {name: self._view(self._m, self.model, name) for name in parameters}
        self._blocks = [*self._state.values(), *self._parameters.values()]
        self._sizes = [block[0].numel() for block in self._blocks]
        self._sensordata = self._view(self._d, self._reference, "sensordata")
        self._last_view = warp.to_torch(self._last_sensordata)
        self._late_sensors = torch.tensor(self._acceleration_columns(), device=self.device)
        self._overflow = warp.to_torch(self._d.overflow)
        kinds = mujoco_warp.OverflowType
        self._dropped = int(kinds.ALL & ~(kinds.ITERATIONS | kinds.LS_ITERATIONS))
        self._bits = torch.zeros(num_worlds, dtype=torch.int32, device=self.device)
        self._readings: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}
        self._pending = torch.zeros(num_worlds, dtype=torch.bool, device=self.device)
        self._is_pending = False
        # Warp's constants differ from the compiler's in the last digits: all worlds have Warp's from the start
        self._constants_stale = self._has_constants
        self.forward()
        self._refresh()
        self.default_row = self.get_state()[:1].clone()

    def _view(self, of: Any, like: Any, name: str) -> Tensor:
        """The array `name` as torch sees it, [N, ...] in C's shape, without a copy."""
        array, expected = getattr(of, name, None), getattr(like, name, None)
        if isinstance(array, self._wp.array) and expected is not None:
            view = self._wp.to_torch(array) if array.size else torch.zeros(self.num_worlds, 0, device=self.device)
            if view.numel() == self.num_worlds * np.size(expected):
                return view.view(self.num_worlds, *np.shape(expected))
        raise ValueError(f"'{name}' is not a field that engine 'warp' keeps for every world")

    def _acceleration_columns(self) -> np.ndarray:
        """Bool [sensordata]: readings that depend on accelerations or forces."""
        late = self.model.sensor_needstage == mujoco.mjtStage.mjSTAGE_ACC
        return np.repeat(late, self.model.sensor_dim)

    # -- stepping ----------------------------------------------------------------------------------------------------

    def _run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Launch `work`, as a graph from the second time on.

        The first time compiles and loads its kernels, which a capture does not allow. No array that a graph refers to
        is ever replaced, so nothing is captured again. Warp's stream and torch's default stream wait for each other, so
        nothing here synchronises; torch must not be on a stream of its own. Tests replay graphs on Warp's CPU device,
        where it is 50 times as fast as launching; on CUDA none has been run yet.
        """
        with self._wp.ScopedDevice(self._on):
            if key not in self._graphs:
                self._graphs[key] = None
                work()
                return
            if self._graphs[key] is None:
                # a collection during the capture could free arrays, which breaks it
                collecting = gc.isenabled()
                gc.disable()
                try:
                    with self._wp.ScopedCapture(device=self._on) as capture:
                        work()
                finally:
                    if collecting:
                        gc.enable()
                self._graphs[key] = capture.graph
            self._wp.capture_launch(self._graphs[key])

    def _advance(self, substeps: int) -> None:
        mjw, m, d = self._mjw, self._m, self._d
        for _ in range(substeps):
            mjw.step(m, d)
        # derived fields are one substep behind now
        self._wp.copy(self._last_sensordata, d.sensordata)
        d.sensordata.zero_()
        mjw.fwd_position(m, d, factorize=False)
        mjw.sensor_pos(m, d)
        mjw.fwd_velocity(m, d)
        mjw.sensor_vel(m, d)

    def _update_constants(self) -> None:
        if self._constants_stale:
            # positions are left at the reference pose: a step or a forward pass always follows
            self._run("constants", lambda: self._mjw.set_const(self._m, self._d, restore=False))
            self._constants_stale = False

    def _refresh(self) -> None:
        """Do the forward pass that was asked for since the last step."""
        if self._is_pending:
            self._update_constants()
            self._run("forward", lambda: self._mjw.forward(self._m, self._d))
            self._publish(self._pending)
            self._pending.zero_()
            self._is_pending = False

    def _publish(self, mask: Tensor | None) -> None:
        for name, live in self._live.items():
            reading = self._readings[name]
            reading.copy_(live if mask is None else torch.where(_wide(mask, live), live, reading))

    def step(self, substeps: int) -> None:
        """Advance by `substeps`, then bring positions, velocities and their sensors up to the new state."""
        self._update_constants()
        self._run(("step", substeps), lambda: self._advance(substeps))
        self._sensordata.copy_(torch.where(self._late_sensors, self._last_view, self._sensordata))
        self._publish(None)
        self._pending.zero_()
        self._is_pending = False

    def forward(self, mask: Tensor | None = None) -> None:
        """Have derived fields of the worlds of `mask` follow their state; computed once, when next they are read."""
        self._pending |= True if mask is None else mask.to(self.device)
        self._is_pending = True

    # -- reading and writing -----------------------------------------------------------------------------------------

    def bind(self, names: Sequence[str]) -> None:
        """Have the engine keep these fields for `read`."""
        self._refresh()
        for name in names:
            if name not in self._state and name not in self._live:
                self._live[name] = self._view(self._d, self._reference, name)
                self._readings[name] = self._live[name].float().clone()

    def read(self, name: str) -> Tensor:
        """A float32 copy [N, ...] of a MuJoCo field; see `Engine.read` for what is current.

        Acceleration-dependent fields are kept from other worlds' forward passes only once they are bound.
        """
        if name in self._state:
            return self._state[name].float().clone()
        self.bind([name])
        return self._readings[name].clone()

    def write(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Write a state or control field; rows that are not finite are refused and flagged."""
        if name not in _WRITABLE:
            raise ValueError(f"'{name}' is not a state or control field: one of {', '.join(_WRITABLE)}")
        target = self._state[name]
        values = values.to(self.device, target.dtype)
        good = torch.isfinite(values).view(self.num_worlds, -1).all(1)
        wanted = torch.ones_like(good) if mask is None else mask.to(self.device)
        self._flag("bad_write", wanted & ~good)
        target.copy_(torch.where(_wide(wanted & good, target), values, target))

    def get_state(self) -> Tensor:
        """State rows float32 [N, S]: MuJoCo's integration state in C's order, then the per-world parameters."""
        return torch.cat([block.reshape(self.num_worlds, -1).float() for block in self._blocks], 1)

    def set_state(self, rows: Tensor, mask: Tensor | None = None, index: Tensor | None = None) -> None:
        """Restore rows [*, S]; rows that are not finite are refused and flagged."""
        rows = rows.to(self.device, torch.float32)
        wanted = torch.ones_like(self._pending) if mask is None else mask.to(self.device)
        if index is not None:
            # worlds that are not wanted may have any index
            rows = rows[torch.where(wanted, index.to(self.device), 0)]
        good = torch.isfinite(rows).all(1)
        taken = wanted & good
        for block, values in zip(self._blocks, rows.split(self._sizes, 1), strict=True):
            block.copy_(torch.where(_wide(taken, block), values.reshape(block.shape).to(block.dtype), block))
        self._bits.masked_fill_(wanted, 0)
        self._flag("bad_write", wanted & ~good)
        self._overflow.masked_fill_(wanted, 0)
        self.commit(taken)

    def parameters(self, name: str) -> Tensor:
        """Live per-world values of a model field, [N, ...] float32."""
        return self._parameters[name]

    def commit(self, mask: Tensor | None = None) -> None:
        """Make written parameters effective and forward."""
        self._constants_stale = self._has_constants
        self.forward(mask)

    # -- looking -----------------------------------------------------------------------------------------------------

    def _flag(self, name: str, mask: Tensor) -> None:
        self._bits |= HEALTH_BITS[name] * mask.int()

    def health(self) -> Tensor:
        """int32 [N] of `HEALTH_BITS`, standing until the world is restored.

        `engine_warning` is what C counts as bad positions, velocities and accelerations: larger than mjMAXVAL.
        """
        motion = torch.cat([self._state[name] for name in ("qpos", "qvel", "act", "qacc_warmstart")], 1)
        self._flag("not_finite", ~torch.isfinite(motion).all(1))
        self._flag("engine_warning", (motion.abs() > mujoco.mjMAXVAL).any(1))
        self._flag("overflow", (self._overflow & self._dropped) != 0)
        return self._bits.clone()

    def render(self, camera: str, ids: Sequence[int], width: int, height: int) -> Tensor:
        """uint8 [n, H, W, 3] of the worlds `ids` through `camera`, drawn on the host by MuJoCo's own renderer."""
        if not hasattr(self, "_renderers"):
            self._renderers: dict[tuple[int, int], mujoco.Renderer] = {}
            self._shown = copy.copy(self.model)
        renderer = self._renderers.get((width, height))
        if renderer is None:
            renderer = self._renderers[width, height] = mujoco.Renderer(self._shown, height, width)
        rows = self.get_state()[list(ids)].cpu().double()
        frames = np.empty((len(ids), height, width, 3), np.uint8)
        for i, row in enumerate(rows):
            state, *values = row.split([sum(self._sizes[: len(self._state)]), *self._sizes[len(self._state) :]])
            for name, value in zip(self._parameters, values, strict=True):
                field = getattr(self._shown, name)
                field[...] = value.numpy().reshape(field.shape)
            mujoco.mj_setState(self._shown, self._reference, state.numpy(), mujoco.mjtState.mjSTATE_INTEGRATION)
            mujoco.mj_forward(self._shown, self._reference)
            renderer.update_scene(self._reference, camera)
            frames[i] = renderer.render()
        return torch.from_numpy(frames)


def _wide(mask: Tensor, like: Tensor) -> Tensor:
    """The mask [N] with as many dimensions as `like`."""
    return mask.view(-1, *[1] * (like.ndim - 1))
