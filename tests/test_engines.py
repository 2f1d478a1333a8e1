"""What every engine promises, on the assembly cell; the CPU engine against plain MuJoCo, Warp against C.

Warp runs on its CPU device unless there is a GPU. Its kernels take about a minute to compile, once: it caches them.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.sim.engines import HEALTH_BITS, describe_health, warp
from embodied.sim.engines.cpu import CpuEngine
from embodied.sim.engines.warp import WarpEngine
from embodied.sim.robots.arm import REFERENCE_QUAT
from embodied.sim.robots.franka import FrankaOptions, franka
from embodied.sim.robots.kinematics import inverse
from embodied.sim.tasks.assembly import Assembly, AssemblyOptions
from embodied.sim.tasks.cell import CENTRE, MOUTH_HEIGHT, build_cell
from embodied.sim.tasks.parts.part import wall_geoms
from embodied.sim.tasks.parts.peg import SIDES
from embodied.spec.errors import BadInput
from embodied.spec.protocols import Engine
from embodied.spec.rotations import rotate

TASK = Assembly(AssemblyOptions(), franka(FrankaOptions()))
MODEL = TASK.model
CLEARANCE = TASK.options.clearance
PHYSICS = mujoco.mj_stateSize(MODEL, mujoco.mjtState.mjSTATE_INTEGRATION)
# where the tip is in the socket [m]: free; in the clear above the mouth; in the chamfer, by 50 um along the hole;
# in the wall, by 50 um, at 20 mm depth
DIP = 5e-5
OFFSETS = {
    "free": (0.01, -0.005, -0.03),
    "above": (0.0002, 0.0001, -0.0005),
    "chamfer": (CLEARANCE + 0.0002, 0.0, 0.0003 + DIP),
    "wall": (CLEARANCE + DIP, 0.0, 0.02),
}
PLACES = list(OFFSETS)
N = 8
needs_warp = pytest.mark.skipif(importlib.util.find_spec("mujoco_warp") is None, reason="mujoco_warp is not installed")
engines = pytest.mark.parametrize("kind", [CpuEngine, pytest.param(WarpEngine, marks=needs_warp)])


def make(kind: type = CpuEngine, count: int = N, threads: int = 1, model: mujoco.MjModel = MODEL) -> Engine:
    """Worlds at `PLACES` in turn, holding still, nothing of this module's model shared."""
    engine = kind(copy.copy(model), count, TASK.parameters, threads)
    engine.bind(["sensordata", "qacc", "site_xpos", "actuator_length"])
    socket = torch.tensor([*CENTRE, MOUTH_HEIGHT], dtype=torch.float64)
    down = torch.tensor(REFERENCE_QUAT, dtype=torch.float64).expand(count, 4)
    offsets = torch.tensor([OFFSETS[PLACES[i % len(PLACES)]] for i in range(count)], dtype=torch.float64)
    tip = socket + rotate(down, offsets)
    joints, reachable = inverse(TASK.arm, tip, down, TASK.part.length)
    assert reachable.all()
    # numbers that float32 holds, so that reading and writing them back changes nothing
    engine.write("qpos", joints.float().double())
    engine.write("ctrl", TASK.controls(tip, down).float().double())
    engine.forward()
    return engine


def drive(engine: Engine, steps: int = 8, seed: int = 0, reset: Callable[[int], None] = lambda step: None) -> Tensor:
    """Readings [steps, N, ...] under random controls of some millimetres, which press the part against the socket."""
    generator = torch.Generator().manual_seed(seed)
    readings = []
    for step in range(steps):
        reset(step)
        # around the present length, so that what comes next depends on the state alone
        tip = engine.read("actuator_length") + 0.005 * torch.randn(engine.num_worlds, 6, generator=generator)
        engine.write("ctrl", tip.double())
        engine.step(5)
        readings.append(torch.cat([engine.read(name).flatten(1) for name in ("sensordata", "qacc", "qvel")], 1))
    return torch.stack(readings)


def vary(engine: Engine, mask: Tensor) -> dict[str, tuple]:
    """Change friction, gains, mass and the hole in the worlds of `mask`; what was changed: name -> (where, factor)."""
    walls = [MODEL.geom(name).id for side in SIDES for name in wall_geoms(side)]
    peg = int(MODEL.geom("peg").bodyid[0])
    changes = {
        "pair_friction": ((slice(None), slice(0, 2)), 1.7),
        "actuator_gainprm": ((slice(None), 0), 0.8),
        "actuator_biasprm": ((slice(None), slice(1, 3)), 0.8),
        "body_mass": ((peg,), 6.0),
        "body_inertia": ((peg,), 6.0),
        "geom_pos": ((walls, slice(0, 2)), 1.001),
    }
    for name, (where, factor) in changes.items():
        live = engine.parameters(name)
        scaled = live.clone()
        scaled[(slice(None), *where)] *= factor
        live[mask] = scaled[mask]
    engine.commit(mask)
    return changes


def only(*worlds: int) -> Tensor:
    mask = torch.zeros(N, dtype=torch.bool)
    mask[list(worlds)] = True
    return mask


# -- restoring ---------------------------------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("varied", [False, True])
def test_restore_and_step_is_bit_exact(kind, varied):
    engine = make(kind)
    if varied:
        vary(engine, only(1, 3, 4))
    drive(engine, seed=1)
    row = engine.get_state()
    expected = drive(engine, seed=2)
    end = engine.get_state()
    engine.set_state(row)
    assert torch.equal(engine.get_state(), row)
    assert torch.equal(drive(engine, seed=2), expected)
    assert torch.equal(engine.get_state(), end)
    # another engine has never seen these parameters: the row brings them
    other = make(kind)
    drive(other, seed=3)
    other.set_state(row)
    assert torch.equal(drive(other, seed=2), expected)
    assert torch.equal(other.get_state(), end)


@engines
def test_resetting_some_worlds_leaves_the_others_bit_equal(kind):
    start = make(kind).get_state()
    mask, undisturbed, engine = only(0, 2, 3, 6), make(kind), make(kind)
    vary(undisturbed, ~mask)
    vary(engine, ~mask)

    def reset(step: int) -> None:
        if step % 2:
            before, readings = engine.get_state()[~mask], engine.read("sensordata")[~mask]
            engine.set_state(start, mask)
            engine.parameters("body_mass")[mask] *= 1.1
            engine.commit(mask)
            engine.forward(mask)
            assert torch.equal(engine.get_state()[~mask], before)
            assert torch.equal(engine.read("sensordata")[~mask], readings)

    expected, got = drive(undisturbed), drive(engine, reset=reset)
    assert torch.equal(got[:, ~mask], expected[:, ~mask])
    assert not torch.equal(got[:, mask], expected[:, mask])


@engines
def test_set_state_gathers_from_a_table(kind):
    engine = make(kind)
    drive(engine)
    table = engine.get_state()[:5]
    drive(engine, seed=1)
    before = engine.get_state()
    mask, index = only(1, 2, 7), torch.tensor([9, 4, 0, -7, 99, 1, 2, 4])  # what is not wanted may point anywhere
    engine.set_state(table, mask, index)
    rows = engine.get_state()
    assert torch.equal(rows[mask], table[[4, 0, 4]])
    assert torch.equal(rows[~mask], before[~mask])


@engines
def test_rows_are_mujocos_integration_state_then_parameters(kind):
    """A row's first part, put into plain MuJoCo, is the same world; the default row is a fresh, nominal world."""
    engine = make(kind)
    drive(engine)
    row = engine.get_state()
    assert row.shape[1] == PHYSICS + sum(getattr(MODEL, name).size for name in TASK.parameters)
    data = mujoco.MjData(MODEL)
    mujoco.mj_setState(MODEL, data, row[5, :PHYSICS].double().numpy(), mujoco.mjtState.mjSTATE_INTEGRATION)
    for name in ("time", "qpos", "qvel", "ctrl", "qacc_warmstart", "mocap_pos", "mocap_quat"):
        np.testing.assert_array_equal(engine.read(name)[5], np.float32(getattr(data, name)))
    fresh = mujoco.MjData(MODEL)
    expected = np.empty(PHYSICS)
    mujoco.mj_getState(MODEL, fresh, expected, mujoco.mjtState.mjSTATE_INTEGRATION)
    parameters = np.concatenate([getattr(MODEL, name).ravel() for name in TASK.parameters])
    tolerance = 0.0 if kind is CpuEngine else 1e-6  # float32
    np.testing.assert_allclose(engine.default_row[0], np.concatenate([expected, parameters]), rtol=tolerance)


# -- the physics is MuJoCo's -------------------------------------------------------------------------------------------


def plain(model: mujoco.MjModel, engine: Engine, world: int) -> mujoco.MjData:
    data = mujoco.MjData(model)
    state = engine.get_state()[world, :PHYSICS].double().numpy()
    mujoco.mj_setState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_forward(model, data)
    return data


def test_cpu_trajectory_is_mj_steps_and_reads_are_current():
    engine = make()
    model = engine.model
    worlds = [plain(model, engine, i) for i in range(N)]
    columns = np.repeat(model.sensor_needstage, model.sensor_dim)
    late = columns == mujoco.mjtStage.mjSTAGE_ACC
    assert late.any() and not late.all()
    touched = 0
    for step in range(10):
        ctrl = engine.read("ctrl").double() + 0.002 * torch.randn(N, 6, generator=torch.Generator().manual_seed(step))
        engine.write("ctrl", ctrl)
        engine.step(7)
        sensors, rows = engine.read("sensordata").numpy(), engine.get_state().numpy()
        for i, data in enumerate(worlds):
            data.ctrl[:] = ctrl[i]
            for _ in range(7):
                mujoco.mj_step(model, data)
            expected = np.empty(PHYSICS)
            mujoco.mj_getState(model, data, expected, mujoco.mjtState.mjSTATE_INTEGRATION)
            np.testing.assert_array_equal(rows[i, :PHYSICS], expected)
            # forces and accelerations are the last substep's, all else the present state's
            np.testing.assert_array_equal(sensors[i, late], np.float32(data.sensordata[late]))
            np.testing.assert_array_equal(engine.read("qacc")[i], np.float32(data.qacc))
            now = plain(model, engine, i)
            np.testing.assert_array_equal(sensors[i, ~late], np.float32(now.sensordata[~late]))
            np.testing.assert_array_equal(engine.read("site_xpos")[i], np.float32(now.site_xpos))
            touched += now.ncon > 0
    assert touched > 10


@engines
def test_a_field_named_only_after_stepping_is_current(kind):
    engine = make(kind)
    drive(engine)
    now = plain(engine.model, engine, 3)
    np.testing.assert_allclose(engine.read("xpos")[3], now.xpos, atol=1e-6)


def test_thread_count_changes_nothing():
    one, four = make(threads=1), make(threads=4)
    assert torch.equal(drive(one), drive(four))
    assert torch.equal(one.get_state(), four.get_state())


@engines
def test_parameters_change_their_world_only(kind):
    engine, nominal = make(kind), make(kind)
    vary(engine, only(1, 3))
    got, expected = drive(engine), drive(nominal)
    changed = (got != expected).any(-1).any(0)
    assert torch.equal(changed, only(1, 3))


@engines
def test_parameters_do_what_a_rebuilt_model_does(kind):
    """The same changes made before compilation; every constant that depends on them is then the compiler's."""
    engine = make(kind)
    changes = vary(engine, only(2, 3))
    factor = {name: factor for name, (_, factor) in changes.items()}
    spec = build_cell(TASK.arm, TASK.part, CLEARANCE)
    for pair in spec.pairs:
        pair.friction[:2] *= factor["pair_friction"]
    for actuator in spec.actuators:
        actuator.gainprm[0] *= factor["actuator_gainprm"]
        actuator.biasprm[1:3] *= factor["actuator_biasprm"]
    spec.geom("peg").mass *= factor["body_mass"]
    for side in SIDES:
        for name in wall_geoms(side):
            spec.geom(name).pos[:2] *= factor["geom_pos"]
    model = spec.compile()
    lead = np.array([0.003, 0.001, 0.004, 0.01, 0.02, 0.05])
    engine.write("ctrl", engine.read("ctrl") + torch.from_numpy(lead))
    engine.forward()
    for world in (2, 3):
        rebuilt, nominal = plain(model, engine, world), plain(MODEL, engine, world)
        # what `read` rounds to; what float32 does in contact, see below. Constants left as they were cost 0.04 rad/s^2
        tolerance = 1e-6 if kind is CpuEngine else 2.5e-2
        assert np.abs(rebuilt.qacc - nominal.qacc).max() > 1.0
        np.testing.assert_allclose(engine.read("qacc")[world], rebuilt.qacc, atol=tolerance)


# -- health ------------------------------------------------------------------------------------------------------------


@engines
def test_values_that_are_not_finite_are_refused_and_flagged(kind):
    engine = make(kind)
    before = engine.get_state()
    qpos, ctrl = engine.read("qpos").double(), engine.read("ctrl").double()
    qpos[3, 2], ctrl[5, 0] = float("nan"), float("inf")
    engine.write("qpos", qpos)
    assert [describe_health(bits) for bits in engine.health().tolist()] == [
        "bad_write" if i == 3 else "healthy" for i in range(N)
    ]
    engine.write("ctrl", ctrl + 0.001, only(4, 5))
    assert torch.equal(engine.health() != 0, only(3, 5))
    after = engine.get_state()
    assert torch.equal(after[[3, 5]], before[[3, 5]])
    torch.testing.assert_close(engine.read("ctrl")[4].double(), ctrl[4] + 0.001, rtol=0, atol=1e-6)
    assert torch.equal(engine.read("ctrl")[6].double(), ctrl[6])
    rows = before.clone()
    rows[1, 4] = float("nan")
    engine.set_state(rows)
    assert torch.equal(engine.health(), HEALTH_BITS["bad_write"] * only(1).int())
    assert torch.equal(engine.get_state(), before)
    engine.set_state(before)
    assert not engine.health().any()


@engines
def test_a_diverged_world_is_flagged_until_restored_and_not_reset(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings to a file where it runs
    engine, healthy = make(kind), make(kind)
    start = engine.get_state()
    speed = torch.full((N, MODEL.nv), 1e12, dtype=torch.float64)
    engine.write("qvel", speed, only(2))
    expected, got = drive(healthy), drive(engine)
    assert not torch.isfinite(got[-1, 2]).all() or got[-1, 2].abs().max() > 1e6
    assert not torch.equal(engine.read("qpos")[2], engine.default_row[0, 1 : 1 + MODEL.nq].float())
    for _ in range(2):
        names = [describe_health(bits) for bits in engine.health().tolist()]
        assert {"engine_warning", "not_finite"} & set(names[2].split(" + "))
        assert names[:2] + names[3:] == ["healthy"] * (N - 1)
    others = ~only(2)
    assert torch.equal(got[:, others], expected[:, others])
    engine.set_state(start, only(2))
    assert not engine.health().any()
    assert torch.equal(drive(engine, 2)[:, 2], expected[:2, 2])


@needs_warp
def test_warp_reports_contacts_that_found_no_room(monkeypatch):
    monkeypatch.setattr(warp, "_CONTACTS", 1)
    engine = make(WarpEngine)
    engine.step(1)
    assert {describe_health(bits) for bits in engine.health().tolist()} == {"overflow"}
    engine.set_state(engine.get_state())
    assert not engine.health().any()


# -- what an engine is -------------------------------------------------------------------------------------------------


@engines
def test_signature_follows_the_model(kind):
    def build(clearance: float) -> mujoco.MjModel:
        return build_cell(TASK.arm, TASK.part, clearance).compile()

    shared = build(CLEARANCE)
    first = make(kind, 1, model=shared).signature
    CpuEngine(shared, 1)
    assert make(kind, 1, model=shared).signature == first == make(kind, 1, model=build(CLEARANCE)).signature
    assert make(kind, 1, model=build(CLEARANCE + 1e-6)).signature != first
    # rows also hold what may differ between worlds
    assert kind(copy.copy(shared), 1, TASK.parameters[:-1], 1).signature != first
    assert first.startswith("cpu-3.17" if kind is CpuEngine else "warp-3.17")


def test_warp_says_what_to_install_or_what_it_cannot_do(monkeypatch):
    if importlib.util.find_spec("mujoco_warp"):
        with pytest.raises(BadInput, match="geom_type"):
            WarpEngine(MODEL, 1, ("geom_type",))
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    with pytest.raises(BadInput, match=r"install embodied\[gpu\]"):
        WarpEngine(MODEL, 1)


@pytest.fixture(scope="module")
def graphics():
    """The environment of a process that can draw. MuJoCo chooses its backend when it is first imported."""
    probe = "import mujoco; mujoco.GLContext(8, 8).make_current()"
    for backend in ("egl", "osmesa"):
        environment = os.environ | {"MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
        if not subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True).returncode:
            return environment
    pytest.skip("no OpenGL backend to draw with: neither egl (libegl1) nor osmesa (libosmesa6) works here")


RENDER = """
import json, sys
import torch
sys.path[:0] = json.loads(sys.argv[1])
import test_engines as t
engine = t.make(getattr(t, sys.argv[2]))
frames = engine.render("side", [1, 0, 5], 96, 64)
again = engine.render("side", [1], 96, 64)
json.dump({"shape": frames.shape, "dtype": str(frames.dtype), "spread": float(frames.float().std()),
           "other_place": float((frames[0].float() - frames[1]).abs().max()),
           "same_place": float((frames[0].float() - frames[2]).abs().max()),
           "repeats": torch.equal(again[0], frames[0])}, sys.stdout)
"""


@engines
def test_render_draws_the_worlds_asked_for(kind, graphics):
    paths = [str(Path(__file__).parent), *sys.path]
    script = [sys.executable, "-c", RENDER, json.dumps(paths), kind.__name__]
    done = subprocess.run(script, env=graphics, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["shape"] == [3, 64, 96, 3] and seen["dtype"] == "torch.uint8"
    assert seen["spread"] > 10 and seen["other_place"] > 50
    # worlds 1 and 5 are at the same place
    assert seen["same_place"] == 0 and seen["repeats"]


# -- one forward pass of Warp against C --------------------------------------------------------------------------------


@engines
def test_contact_distance_is_the_geometrys(kind):
    """The peg's edge `DIP` (along the hole) inside a 45 degree chamfer, or its side `DIP` inside the wall."""
    distance = make(kind).read("sensordata")[:4, TASK.sensors["contact"]][:, 0].double().numpy()
    # inverse kinematics leaves some tenths of a micrometre
    np.testing.assert_allclose(distance, [0, 0, -DIP / np.sqrt(2), -DIP], atol=1e-6)


@needs_warp
def test_warp_agrees_with_c():
    """Single passes from the same float32 numbers, moving and under control, free and in contact."""
    engine = make(WarpEngine)
    generator = torch.Generator().manual_seed(5)
    lead = torch.tensor([0.003, 0.003, 0.003, 0.02, 0.02, 0.02]) * torch.randn(N, 6, generator=generator)
    engine.write("ctrl", engine.read("ctrl") + lead)
    engine.write("qvel", 0.1 * torch.randn(N, MODEL.nv, generator=generator))
    engine.forward()
    late = np.repeat(MODEL.sensor_needstage == mujoco.mjtStage.mjSTAGE_ACC, MODEL.sensor_dim)
    contact = TASK.sensors["contact"]
    worlds = [plain(MODEL, engine, i) for i in range(N)]
    for i, data in enumerate(worlds):
        touching = PLACES[i % len(PLACES)] in ("chamfer", "wall")
        assert (data.ncon > 0) == touching
        sensors = engine.read("sensordata")[i].numpy()
        # float32 resolves a metre to 6e-8 m, and poses are sums along the arm
        for name in ("site_xpos", "actuator_length", "actuator_velocity"):
            np.testing.assert_allclose(engine.read(name)[i], getattr(data, name), atol=5e-7, err_msg=name)
        np.testing.assert_allclose(sensors[~late], data.sensordata[~late], atol=5e-7)
        np.testing.assert_allclose(sensors[contact], data.sensordata[contact], atol=3e-7)
        # free: 1e-7 m times 1500 N/m; in contact: 1e-7 m over the contact's time constant squared, (4 ms)^2, are
        # 6e-3 m/s^2 at the tip, and more rad/s^2 at a light joint, of some 100 rad/s^2 that contact itself causes
        np.testing.assert_allclose(engine.read("qacc")[i], data.qacc, atol=5e-2 if touching else 1e-3)
        np.testing.assert_allclose(sensors[late], data.sensordata[late], atol=3e-2 if touching else 1e-4, rtol=1e-4)
    # after a step, what depends on accelerations is of before it, all else of after it
    engine.step(1)
    for i, before in enumerate(worlds):
        touching, after = before.ncon > 0, plain(MODEL, engine, i)
        sensors = engine.read("sensordata")[i].numpy()
        np.testing.assert_allclose(sensors[late], before.sensordata[late], atol=3e-2 if touching else 1e-4, rtol=1e-4)
        np.testing.assert_allclose(sensors[~late], after.sensordata[~late], atol=5e-7)
        np.testing.assert_allclose(engine.read("site_xpos")[i], after.site_xpos, atol=5e-7)
        np.testing.assert_allclose(engine.read("qvel")[i], before.qvel + MODEL.opt.timestep * before.qacc, atol=1e-3)
