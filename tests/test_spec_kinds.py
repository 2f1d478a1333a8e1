"""Robots and actions of several kinds: what their policies see, command and remember, by hand, in numpy, torch and scipy."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from embodied.algos import checkpoint
from embodied.commands.build import make_engine, make_fresh_env, make_policy, make_task
from embodied.commands.export import export
from embodied.compose import compose
from embodied.deploy.artifact import PolicyArtifact, commands, differences, kept, needed_readings
from embodied.sim.robots.crazyflie import CrazyflieOptions, crazyflie
from embodied.sim.robots.franka import FrankaOptions, franka
from embodied.sim.robots.go1 import Go1Options, go1
from embodied.sim.tasks.flight import HoverOptions, TrackOptions, hover, track
from embodied.sim.tasks.locomotion import Locomotion, LocomotionOptions
from embodied.spec import registry
from embodied.spec.errors import BadInput, Fault
from embodied.spec.observe import command, observe, start_memory
from embodied.spec.policy import JointTargets, PolicySpec, RotorSpeeds, Term, of_arm
from embodied.spec.robot import KINDS, RobotSpec, digest

LEGS, CRAFT = go1(Go1Options()).spec, crazyflie(CrazyflieOptions()).spec
WALK = Locomotion(LocomotionOptions(), go1(Go1Options())).spec
HOVER = hover(HoverOptions(), crazyflie(CrazyflieOptions())).spec
TRACK = track(TrackOptions(), crazyflie(CrazyflieOptions())).spec
HEIGHTS = 7


def seeing(*terms: Term, robot: RobotSpec = LEGS) -> PolicySpec:
    """A policy that sees these terms alone."""
    action = RotorSpeeds() if robot is CRAFT else JointTargets(tuple(0.1 * (1 + i) for i in range(12)))
    return PolicySpec("some", robot, terms, action, None, 1.0)


def as_tensors(values: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in values.items()}


def quats(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.roll(Rotation.random(count, rng=rng).as_quat(), 1, axis=1)


def turn_of(quat: np.ndarray) -> Rotation:
    return Rotation.from_quat(np.roll(quat, -1, axis=1))


# -- what is seen --------------------------------------------------------------------------------------------------------


def expected(kind: str, frame: str, readings: dict[str, np.ndarray], memory: dict[str, np.ndarray]) -> np.ndarray:
    """What a term should show before it is scaled, by scipy."""
    if kind == "gravity":
        return turn_of(readings["trunk_quat"]).inv().apply([0.0, 0.0, -1.0])
    if kind == "rotation_matrix":
        turn = turn_of(readings["trunk_quat"])
        turn = turn if frame == "base" else turn_of(readings[f"{frame}_quat"]).inv() * turn
        return turn.as_matrix().reshape(-1, 9)  # row by row; columns are the trunk's axes
    return memory[kind] if kind == "past_actions" else readings[kind]


@pytest.mark.parametrize(
    "term",
    [
        Term("attitude", "rotation_matrix", "1", 1.0, of="trunk"),
        Term("attitude", "rotation_matrix", "1", 2.0, of="trunk", frame="goal"),
        Term("down", "gravity", "1", 1.0, of="trunk"),
        Term("spin", "gyro", "rad/s", 3.0, of="trunk"),
        Term("command", "request", "m/s, rad/s", 0.5, count=3),
        Term("scan", "heights", "m", 0.25, of="trunk", clip=1.5, count=HEIGHTS),
        Term("history", "past_actions", "1", 1.0, count=4),
    ],
    ids=lambda term: f"{term.kind} in {term.frame}",
)
@given(seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_new_kinds_of_terms_agree_with_scipy_in_numpy_and_torch(term: Term, seed: int) -> None:
    rng, count = np.random.default_rng(seed), 5
    sizes = {"gyro": 3, "request": 3, "heights": HEIGHTS, "past_actions": 48}
    readings = {"trunk_quat": quats(rng, count), "goal_quat": quats(rng, count)}
    readings |= {name: rng.standard_normal((count, size)) for name, size in sizes.items() if name != "past_actions"}
    memory = {"past_actions": rng.uniform(-1, 1, (count, 48))}
    spec = seeing(term)
    wanted = expected(term.kind, term.frame, readings, memory) / term.scale
    if term.clip is not None:
        wanted = np.clip(wanted, -term.clip, term.clip)
    assert spec.obs_size == wanted.shape[1]
    seen = observe(spec, readings, memory)
    np.testing.assert_allclose(seen, wanted, atol=1e-12)
    np.testing.assert_allclose(observe(spec, as_tensors(readings), as_tensors(memory)).numpy(), wanted, atol=1e-12)


def test_attitudes_by_hand() -> None:
    """Rolled to its right by 90 degrees, then turned to its left by 90: what was its left side is up."""
    half = math.sqrt(0.5)
    turn = Rotation.from_quat([0, 0, half, half]) * Rotation.from_quat([half, 0, 0, half])
    readings = {"trunk_quat": np.roll(turn.as_quat(), 1)[None]}
    spec = seeing(Term("a", "rotation_matrix", "1", 1.0, of="trunk"), Term("b", "gravity", "1", 1.0, of="trunk"))
    seen = observe(spec, readings, {})[0]
    # x ahead is the world's y; y, its left, is up; z, its top, is the world's x
    np.testing.assert_allclose(seen[:9].reshape(3, 3), [[0, 0, 1], [1, 0, 0], [0, 1, 0]], atol=1e-12)
    np.testing.assert_allclose(seen[9:], [0, -1, 0], atol=1e-12)


def test_terms_that_are_counted_take_a_count_and_no_others() -> None:
    assert seeing(Term("x", "heights", "m", 1.0, count=187)).sizes == (187,)
    assert seeing(Term("x", "past_actions", "1", 1.0, count=3), robot=CRAFT).sizes == (12,)
    for kind, count in (("gravity", 2), ("last_action", 2), ("heights", 0)):
        with pytest.raises(
            BadInput, match=f"term 'x': count={count} of '{kind}': {'only' if count else 'expected at least 1'}"
        ):
            Term("x", kind, "1", 1.0, count=count)
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(BadInput, match=f"term 'x': scale={scale}: expected a finite number above 0"):
            Term("x", "gyro", "rad/s", scale)
    with pytest.raises(BadInput, match="frame='goal': 'gyro' is not expressed in a frame"):
        Term("x", "gyro", "rad/s", 1.0, frame="goal")
    with pytest.raises(BadInput, match="did you mean 'gravity'"):
        Term("x", "gravty", "1", 1.0)


# -- what is commanded and remembered ------------------------------------------------------------------------------------


def readings_for(spec: PolicySpec, rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    needed = needed_readings(spec)
    return {
        name: quats(rng, count) if name.endswith("quat") else rng.standard_normal((count, size))
        for name, size in needed.items()
    }


@pytest.mark.parametrize("spec", [WALK, HOVER, TRACK], ids=lambda spec: spec.task)
def test_numpy_and_torch_observe_command_and_remember_alike(spec: PolicySpec) -> None:
    rng = np.random.default_rng(0)
    readings = readings_for(spec, rng, 6)
    tensors = as_tensors(readings)
    memory, other = start_memory(spec, readings), start_memory(spec, tensors)
    for _ in range(4):
        action = rng.uniform(-1.5, 1.5, (6, spec.action.size))
        memory, other = command(spec, action, readings, memory), command(spec, torch.from_numpy(action), tensors, other)
        assert memory.keys() == other.keys() == {*kept(spec), *commands(spec)}
        for name, value in memory.items():
            np.testing.assert_allclose(value, other[name].numpy(), rtol=1e-12, atol=1e-12)
        seen = observe(spec, readings, memory)
        assert seen.shape == (6, spec.obs_size)
        np.testing.assert_allclose(seen, observe(spec, tensors, other).numpy(), atol=1e-12)


def test_joint_targets_by_hand() -> None:
    spec = seeing(Term("q", "joint_position", "rad", 0.5))
    readings = {"joint_pos": np.array(LEGS.home)[None] + 0.25}
    memory = start_memory(spec, readings)
    np.testing.assert_array_equal(memory["target_joints"], [LEGS.home])  # the rest pose, wherever the robot is
    np.testing.assert_allclose(observe(spec, readings, memory), 0.5)
    action = np.linspace(-1.2, 1.2, 12)[None]
    memory = command(spec, action, readings, memory)
    clipped = [-1, *np.linspace(-1.2, 1.2, 12)[1:-1], 1]
    scale = 0.1 * np.arange(1, 13)
    np.testing.assert_allclose(memory["target_joints"], [np.array([0, 0.9, -1.8] * 4) + clipped * scale], atol=1e-12)
    np.testing.assert_allclose(memory["last_action"], [clipped])


def test_rotor_speeds_by_hand() -> None:
    spec = seeing(Term("spin", "gyro", "rad/s", 1.0), robot=CRAFT)
    memory = command(spec, np.array([[-1.0, 0.0, 0.5, 2.0]]), {"gyro": np.zeros((1, 3))}, {})
    np.testing.assert_allclose(memory["rotor_speeds"], [[0.0, 10851.0, 16276.5, 21702.0]])
    idling = replace(spec, robot=replace(CRAFT, rpm=(2000.0, 20000.0)))
    memory = command(idling, np.array([[-1.0, 0.0, 0.5, 1.0]]), {"gyro": np.zeros((1, 3))}, {})
    np.testing.assert_allclose(memory["rotor_speeds"], [[2000.0, 11000.0, 15500.0, 20000.0]])


def test_past_actions_go_by_the_newest_first_as_clipped() -> None:
    spec = seeing(Term("history", "past_actions", "1", 1.0, count=3), Term("last", "last_action", "1", 1.0), robot=CRAFT)
    readings = {"gyro": np.zeros((2, 3))}
    memory = start_memory(spec, readings)
    assert memory["past_actions"].shape == (2, 12) and not memory["past_actions"].any()
    for number in (0.1, 0.2, 0.3, 0.4, 5.0):
        memory = command(spec, np.array([[number] * 4, [-number] * 4]), readings, memory)
    wanted = np.repeat([1.0, 0.4, 0.3], 4)
    np.testing.assert_allclose(observe(spec, readings, memory), [[*wanted, *[1.0] * 4], [*-wanted, *[-1.0] * 4]])


def test_the_clock_turns_with_its_period_from_the_beginning() -> None:
    gait, slow = Term("gait", "clock", "s", 0.5, clip=2.0), Term("slow", "clock", "s", 4.0)
    spec = seeing(gait, slow, Term("spin", "gyro", "rad/s", 2.0))
    readings = {"gyro": np.full((2, 3), 3.0), "joint_pos": np.zeros((2, 12))}
    memory = start_memory(spec, readings)
    assert memory["time"].shape == (2, 1) and spec.sizes == (2, 2, 3)
    for step in range(60):
        turns = 0.02 * step / np.array([0.5, 4.0])
        wanted = [*np.array([np.sin(2 * math.pi * turns), np.cos(2 * math.pi * turns)]).T.flatten(), 1.5, 1.5, 1.5]
        np.testing.assert_allclose(observe(spec, readings, memory), [wanted] * 2, atol=1e-9)
        np.testing.assert_allclose(observe(spec, as_tensors(readings), as_tensors(memory)), [wanted] * 2, atol=1e-9)
        memory = command(spec, np.zeros((2, 12)), readings, memory)


def test_what_is_needed_commanded_and_kept() -> None:
    assert needed_readings(WALK) == {"gyro": 3, "trunk_quat": 4, "joint_pos": 12, "joint_vel": 12, "request": 3}
    assert commands(WALK) == {"target_joints": 12} and kept(WALK) == {"last_action": 12, "time": 1}
    body = {"body_pos": 3, "body_quat": 4, "body_linvel": 3, "gyro": 3}
    assert needed_readings(HOVER) == body
    assert needed_readings(TRACK) == body | {"goal_pos": 3, "goal_quat": 4, "goal_linvel": 3, "ahead_pos": 3}
    for spec in (HOVER, TRACK):
        assert commands(spec) == {"rotor_speeds": 4} and kept(spec) == {
            "last_action": 4,
            "past_actions": 4 * HoverOptions().history,
        }
    blind = hover(HoverOptions(history=0), crazyflie(CrazyflieOptions())).spec
    assert kept(blind) == {"last_action": 4} and blind.history == 0
    scanning = seeing(
        Term("scan", "heights", "m", 1.0, of="trunk", count=HEIGHTS), Term("to", "position", "m", 1.0, "goal", "trunk")
    )
    assert needed_readings(scanning) == {"heights": HEIGHTS, "goal_pos": 3, "trunk_pos": 3, "trunk_quat": 4}


@pytest.mark.parametrize("spec", [WALK, HOVER, TRACK, seeing(Term("scan", "heights", "m", 1.0, count=3))], ids=lambda s: s.task)
def test_observing_takes_what_is_needed_and_nothing_less(spec: PolicySpec) -> None:
    """Injected fault: each reading is missed where it is left out."""
    rng = np.random.default_rng(1)
    readings = readings_for(spec, rng, 1)
    memory = {name: rng.uniform(-1, 1, (1, size)) for name, size in kept(spec).items()}
    action = np.zeros((1, spec.action.size))
    assert observe(spec, readings, memory).shape == (1, spec.obs_size)
    assert {name: value.shape[1] for name, value in command(spec, action, readings, memory).items()} == commands(spec) | kept(
        spec
    )
    for name in readings:
        rest = {key: value for key, value in readings.items() if key != name} | {"other": np.zeros((1, 1))}
        with pytest.raises(KeyError, match=name):
            observe(spec, rest, memory)


# -- descriptions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", registry.names("robot"))
def test_robots_survive_json(name: str) -> None:
    entry = registry.find("robot", name)
    spec = entry.build(entry.options()).spec
    again = RobotSpec.from_dict(json.loads(json.dumps(asdict(spec))))
    assert again == spec and type(again) is type(spec) is KINDS[spec.kind] and digest(again) == digest(spec)
    assert hash(again) == hash(spec)  # tuples stayed tuples, all the way down
    changed = replace(spec, physics_dt=spec.physics_dt / 2)
    assert digest(changed) != digest(spec) and changed.substeps == 2 * spec.substeps


@pytest.mark.parametrize("spec", [WALK, HOVER, TRACK], ids=lambda spec: spec.task)
def test_policies_survive_json(spec: PolicySpec) -> None:
    again = PolicySpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec and digest(again) == digest(spec) and again.sizes == spec.sizes and again.max_steps == spec.max_steps
    for part in fields(spec):
        value = getattr(spec, part.name)
        assert type(getattr(again, part.name)) is type(value)
        assert not is_dataclass(value) or hash(getattr(again, part.name)) == hash(value)


@pytest.mark.parametrize(("part", "kind"), [("robot", "walker"), ("action", "torques")])
def test_unknown_kinds_are_missed(part: str, kind: str) -> None:
    data = json.loads(json.dumps(WALK.to_dict()))
    data[part]["kind"] = kind
    with pytest.raises(KeyError, match=kind):
        PolicySpec.from_dict(data)


@pytest.mark.parametrize("spec", [WALK, HOVER, TRACK], ids=lambda spec: spec.task)
def test_what_serves_arms_alone_refuses_them(spec: PolicySpec) -> None:
    arm = franka(FrankaOptions()).spec
    for use in (lambda: of_arm(spec), lambda: differences(spec, arm, {}, {})):
        with pytest.raises(BadInput, match=f"task '{spec.task}' is for robot '{spec.robot.name}', which is no arm: expected"):
            use()


# -- export --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["hover", "track", "locomotion", "traverse"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any, Path]:
    """A configuration, a small random policy of its task, and the file it was exported to, by way of a checkpoint."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    words = [f"task={request.param}", "policy.hidden=[16]", "sim.num_worlds=4", "sim.threads=1", f"out={folder}"]
    config = compose("train", words).config
    task = make_task(config)
    policy = make_policy(config, task.obs_sizes, task.spec.action.size)
    with torch.no_grad():
        for weights in policy.network.parameters():
            weights.add_(0.05 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(1)))
    signature = make_engine(config, task, 1).signature
    trainer = {"learner": {"policy": policy.state_dict()}, "env": {"signature": signature}, "iteration": 3, "env_steps": 96}
    checkpoint.save(folder / "checkpoints" / "latest.pt", {"trainer": trainer, "config": config})
    done = export(config, folder / "checkpoints" / "latest.pt", say=pytest.fail)
    assert done.max_difference <= 1e-5 and done.observations == 1000
    return config, policy, done.policy


def test_exported_policies_prove_themselves(exported: tuple[dict[str, Any], Any, Path]) -> None:
    config, _, path = exported
    artifact, spec = PolicyArtifact.load(path), make_task(config).spec
    artifact.check_golden()
    assert artifact.spec == spec
    for case in artifact.metadata["golden"]:
        assert case["readings"].keys() == needed_readings(spec).keys() and case["memory"].keys() == kept(spec).keys()
        assert case["command"].keys() == commands(spec).keys()
    tampered = artifact.metadata["golden"][-1]
    (name,) = commands(spec)
    tampered["command"][name][0][1] += 0.1
    with pytest.raises(Fault, match=rf"golden case 3: command {name}\[1\] is"):
        artifact.check_golden()


def test_exported_policies_do_in_numpy_what_they_do_in_the_worlds(exported: tuple[dict[str, Any], Any, Path]) -> None:
    """The whole chain from readings to commands, for an episode's first steps, on the control process's side."""
    config, policy, path = exported
    artifact, task = PolicyArtifact.load(path), make_task(config)
    env = make_fresh_env(config, task, 4, print)
    obs, memory = env.reset(3), None
    for _ in range(10):
        saved = env.state_dict()
        readings = {name: saved["seen"][name].double().numpy() for name in needed_readings(artifact.spec)}
        if memory is None:
            memory = {name: saved["state"][name].double().numpy() for name in kept(artifact.spec)}
        seen = observe(artifact.spec, readings, memory)
        np.testing.assert_allclose(seen, obs["policy"], atol=1e-5)
        action = policy.act(obs, deterministic=True).action[:, 0]
        mine = artifact.act(seen)
        np.testing.assert_allclose(mine, action, atol=2e-5)
        memory = command(artifact.spec, action.double().numpy(), readings, memory)
        obs, _, _, _, info = env.step(action)
        assert not bool(info["episode"]["ended"].any())
        control = env.engine.read("ctrl").double().numpy()
        if "rotor_speeds" in memory:
            np.testing.assert_allclose(control, artifact.spec.robot.thrust * memory["rotor_speeds"] ** 2, rtol=1e-5, atol=1e-7)
        else:
            np.testing.assert_allclose(control, memory["target_joints"], atol=1e-6)
