"""When recorded numbers mean what a task's do: against what the two specifications make of the same readings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation
from scripted import ROBOTS, cell

from embodied import cli
from embodied.commands.datasets import check_datasets
from embodied.data.files import EXTRA
from embodied.deploy.artifact import commands, needed_readings
from embodied.sim.robots.crazyflie import CrazyflieOptions, crazyflie
from embodied.sim.robots.franka import FrankaOptions, franka
from embodied.sim.robots.go1 import Go1Options, go1
from embodied.sim.tasks.assembly import policy_spec
from embodied.sim.tasks.flight import HoverOptions, hover
from embodied.sim.tasks.locomotion import Locomotion, LocomotionOptions
from embodied.spec.errors import BadInput
from embodied.spec.meaning import difference
from embodied.spec.observe import command, observe, start_memory
from embodied.spec.policy import PolicySpec

PEG = policy_spec(franka(FrankaOptions()))
WALK = Locomotion(LocomotionOptions(), go1(Go1Options())).spec
HOVER = hover(HoverOptions(), crazyflie(CrazyflieOptions())).spec
Change = Callable[[PolicySpec], PolicySpec]


def term(number: int, **changes: Any) -> Change:
    """One that changes that term."""
    return lambda spec: replace(
        spec, terms=tuple(replace(x, **changes) if i == number else x for i, x in enumerate(spec.terms))
    )


def robot(**changes: Any) -> Change:
    return lambda spec: replace(spec, robot=replace(spec.robot, **changes))


def joints(**changes: Any) -> Change:
    return lambda spec: robot(joints=tuple(replace(joint, **changes) for joint in spec.robot.joints))(spec)


def action(**changes: Any) -> Change:
    return lambda spec: replace(spec, action=replace(spec.action, **changes))


def swapped(spec: PolicySpec) -> PolicySpec:
    return replace(spec, terms=(spec.terms[1], spec.terms[0], *spec.terms[2:]))


def renamed(spec: PolicySpec) -> PolicySpec:
    return replace(spec, terms=tuple(replace(x, name=x.name.upper()) for x in spec.terms), task="other")


def of_ur5e(spec: PolicySpec) -> PolicySpec:
    return replace(policy_spec(ROBOTS["ur5e"]()), episode_s=9.0)


def gains(spec: PolicySpec) -> PolicySpec:
    return robot(impedance=replace(spec.robot.impedance, stiffness=(100.0, 5.0)))(spec)


def watched(spec: PolicySpec) -> PolicySpec:
    """With success judged otherwise, and a longer time limit."""
    return replace(spec, success=replace(spec.success, depth=0.01), episode_s=20.0)


def numbers(spec: PolicySpec, like: PolicySpec) -> list[np.ndarray]:
    """What a policy sees of some readings, and what two actions of it command, by spec; both specs need these readings."""
    readings = {}
    for name, size in (needed_readings(spec) | needed_readings(like)).items():
        rng = np.random.default_rng([*name.encode()])
        if name.endswith("quat"):
            readings[name] = np.roll(Rotation.random(3, rng=rng).as_quat(), 1, axis=1)
        else:
            readings[name] = 0.002 * rng.standard_normal((3, size))
            if name.endswith("_pos") and size == 3:
                readings[name] += np.array([0.5, 0.0, 0.2])
    rng, memory, seen = np.random.default_rng(0), start_memory(spec, readings), []
    for _ in range(2):
        memory = command(spec, 0.3 * rng.uniform(-1, 1, (3, spec.action.size)), readings, memory)
        seen += [memory[name] for name in commands(spec)] + [observe(spec, readings, memory)]
    return seen


@pytest.mark.parametrize(
    ("ours", "change", "said"),
    [
        (PEG, term(1, scale=0.005), "scale of observation term 1, 'tip position, fine', is 0.005, the task's is 0.004"),
        (PEG, term(3, frame="base"), "frame of observation term 3, 'tip velocity', is base, the task's is socket"),
        (PEG, term(5, clip=0.0001), "clip of observation term 5, 'wrist force', is 0.0001, the task's is 3.0"),
        (PEG, swapped, "scale of observation term 0, 'tip position', is 0.004, the task's is 0.05"),
        (PEG, lambda spec: replace(spec, terms=spec.terms[:-1]), "from 'last action' on, is 9, the task's is 10"),
        (PEG, action(translation=0.002), "translation of the action is 0.002, the task's is 0.004"),
        (PEG, action(frame="base"), "frame of the action is base, the task's is socket"),
        (WALK, action(scale=(0.1,) * 12), r"scale of the action is \(0.1, "),
        (WALK, joints(home=0.2), r"the rest pose \[rad\] is \(0.2, "),
        (HOVER, robot(rpm=(0.0, 20000.0)), r"the range of rotor speeds \[rpm\] is \(0.0, 20000.0\)"),
        (PEG, renamed, None),
        (PEG, watched, None),
        (PEG, gains, None),
        (PEG, of_ur5e, None),
        (PEG, joints(effort=1.0, velocity=1.0, home=0.3), None),
        (WALK, robot(physics_dt=0.001, stiffness=(9.0,) * 12), None),
        (HOVER, robot(thrust=1e-9, delay=0.3), None),
        (HOVER, renamed, None),
    ],
)
def test_a_difference_is_what_changes_numbers(ours: PolicySpec, change: Change, said: str | None) -> None:
    theirs = PolicySpec.from_dict(json.loads(json.dumps(change(ours).to_dict())))
    found = difference(theirs, ours)
    one, other = numbers(theirs, ours), numbers(ours, theirs)
    same = all(a.shape == b.shape and np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert same == (found is None)
    if said is None:
        assert found is None
    else:
        with pytest.raises(BadInput, match=said):
            raise BadInput(found)


def test_what_readings_do_not_tell_is_compared_too() -> None:
    """Who computes a request, the order of joints as the readings give them, the time between two frames."""
    assert difference(robot(control_dt=0.02)(PEG), PEG) == "the time between actions [s] is 0.02, the task's is 0.04"
    assert "the task is other, the task's is locomotion" in str(difference(replace(WALK, task="other"), WALK))
    turned = robot(joints=WALK.robot.joints[::-1])(WALK)
    assert "the order of joints is" in str(difference(turned, WALK))
    assert difference(PEG, PEG) is difference(WALK, WALK) is difference(HOVER, HOVER) is None
    assert "the kind of action is rotor_speeds" in str(difference(replace(PEG, action=HOVER.action), PEG))


# -- of datasets ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "script"
    words = ["task=assembly", "expert=script", "episodes=4", "task.episode_s=0.8", "sim.threads=1", f"out={folder}"]
    assert cli.main(["collect", *words]) == 0
    return folder


@pytest.mark.parametrize("option", ["algo=sft algo.only_success=false algo.data", "algo.co_data"])
def test_a_dataset_of_another_rate_is_refused_before_anything_is_made(data, option, tmp_path, capsys) -> None:
    words = [*f"{option}={data}".split(), "robot.control_dt=0.02", "sim.num_worlds=8", f"out={tmp_path / 'run'}"]
    assert cli.main(["train", "task=assembly", *words]) == 2
    said = capsys.readouterr().err
    assert f"algo.{option.rpartition('.')[2]}={data}: the time between actions [s] is 0.04, the task's is 0.02" in said
    assert "collect the data with the task and robot options that are trained" in said
    assert not (tmp_path / "run").exists()


def test_a_dataset_is_judged_by_its_specification_alone(data, tmp_path) -> None:
    spec = cell("rod", success_depth=0.01).spec  # sees and does what the peg's policy does
    config = {"algo": {"name": "sft", "data": str(data), "co_data": ""}}
    check_datasets(config, spec)
    with pytest.raises(BadInput, match="from 'tip rotation, fine' on, is 10, the task's is 11"):
        check_datasets(config, cell("bayonet").spec)
    check_datasets({"algo": {"name": "ppo", "co_data": ""}}, WALK)
    other = tmp_path / "other"
    (other / "meta").mkdir(parents=True)
    config["algo"]["data"] = str(other)
    for extra in (None, {}, {"seed": 3}):  # of other origin
        if extra is not None:
            (other / EXTRA).write_text(json.dumps(extra))
        check_datasets(config, WALK)
    for spoilt in ({}, [], "x", {**spec.to_dict(), "action": {"kind": "jump"}}, {**spec.to_dict(), "terms": 3}):
        (other / EXTRA).write_text(json.dumps({"spec": spoilt}))
        with pytest.raises(BadInput, match=r"embodied\.json: its spec cannot be read .*: restore it from a copy"):
            check_datasets(config, spec)
