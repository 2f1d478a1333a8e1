"""An exported policy on the robot's side: what it computes, what it refuses, what it notices. No worlds are needed."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from embodied.deploy.artifact import PolicyArtifact, commands, differences, kept, needed_readings
from embodied.deploy.export import Case, Origin, write_policy
from embodied.policies.gaussian import GaussianPolicy, MLPOptions
from embodied.sim.robots.franka import FrankaOptions, franka
from embodied.sim.tasks.assembly import policy_spec
from embodied.spec.errors import BadInput, Fault
from embodied.spec.observe import observe
from embodied.spec.policy import PolicySpec, Term
from embodied.spec.robot import ArmSpec, ImpedanceSpec, JointSpec, MotionSpec
from embodied.spec.rotations import quat_multiply, rotvec_to_quat

SPEC = policy_spec(franka(FrankaOptions()))
ROBOT = SPEC.robot
READINGS, COMMANDS = needed_readings(SPEC), commands(SPEC)
D = SPEC.obs_size


def make_policy(seed: int = 0) -> GaussianPolicy:
    """A policy that answers with actions all over [-1, 1], and whose normaliser has seen something."""
    torch.manual_seed(seed)
    policy = GaussianPolicy(MLPOptions(hidden=[16, 16]), {"policy": D}, SPEC.action.size)
    with torch.no_grad():
        for name, value in policy.network.named_parameters():
            value += (0.05 if name.startswith("4") else 0.01) * torch.randn(value.shape)
    policy.update_normaliser({"policy": 0.5 + torch.rand(D) * torch.randn(300, D)}, torch.ones(300, dtype=torch.bool))
    return policy


def make_case(rng: np.random.Generator) -> Case:
    """A tool touching a socket that points down: nothing is zero, and the finest term is inside its clip."""

    def near(quat: np.ndarray, size: float) -> np.ndarray:
        return quat_multiply(rotvec_to_quat(size * rng.standard_normal((1, 3))), quat)

    down = np.array([[0.0, 1.0, 0.0, 0.0]])
    tcp = np.array([[0.5, 0.05, 0.1]]) + 0.01 * rng.standard_normal((1, 3))
    quat = near(down, 0.1)
    readings = {
        "tcp_pos": tcp,
        "tcp_quat": quat,
        "tcp_linvel": 0.05 * rng.standard_normal((1, 3)),
        "tcp_angvel": 0.2 * rng.standard_normal((1, 3)),
        "force": 4.0 * rng.standard_normal((1, 3)),
        "torque": 0.4 * rng.standard_normal((1, 3)),
        "joint_pos": np.array([ROBOT.home]) + 0.1 * rng.standard_normal((1, 7)),
        "joint_vel": 0.1 * rng.standard_normal((1, 7)),
        "socket_pos": tcp + rng.uniform(-0.003, 0.003, (1, 3)),
        "socket_quat": near(down, 0.1),
    }
    memory = {
        "target_pos": tcp + rng.uniform(-0.002, 0.002, (1, 3)),
        "target_quat": near(quat, 0.01),
        "last_action": rng.uniform(-1.0, 1.0, (1, 6)),
    }
    return Case(*({name: torch.tensor(x, dtype=torch.float32) for name, x in part.items()} for part in (readings, memory)))


@pytest.fixture(scope="module")
def policy() -> GaussianPolicy:
    return make_policy()


@pytest.fixture(scope="module")
def file(policy: GaussianPolicy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "policy.onnx"
    rng = np.random.default_rng(5)
    observations = torch.from_numpy(rng.standard_normal((100, D)).astype(np.float32))
    origin = Origin("cpu-3.17.0-abc", "0" * 64, 7, 700)
    with torch.no_grad():
        write_policy(policy, SPEC, origin, [make_case(rng) for _ in range(3)], observations, out)
    return out


@pytest.fixture(scope="module")
def artifact(file: Path) -> PolicyArtifact:
    return PolicyArtifact.load(file)


Change = Callable[[onnx.ModelProto, dict[str, Any]], None]


def tampered(file: Path, folder: Path, change: Change) -> Path:
    """A copy of the file after `change` of its graph or of its metadata."""
    model = onnx.load(file)
    metadata = json.loads(model.metadata_props[0].value)
    change(model, metadata)
    for entry in model.metadata_props:
        if entry.key == "embodied" and entry.value != "keep":
            entry.value = json.dumps(metadata)
    out = folder / "tampered.onnx"
    out.write_bytes(model.SerializeToString())
    return out


# -- what it computes ----------------------------------------------------------------------------------------------------


def by_hand(policy: GaussianPolicy, obs: np.ndarray) -> np.ndarray:
    """The policy in double precision, from its weights and statistics alone."""
    state = {name: value.double().numpy() for name, value in policy.state_dict().items()}
    std = np.sqrt(state["normaliser.m2"] / state["normaliser.count"] + 1e-8)
    x = np.clip((obs - state["normaliser.mean"]) / std, -10, 10)
    for layer in (0, 2):
        x = x @ state[f"network.{layer}.weight"].T + state[f"network.{layer}.bias"]
        x = np.where(x > 0, x, np.expm1(np.minimum(x, 0)))
    return np.tanh(x @ state["network.4.weight"].T + state["network.4.bias"])


@given(seed=st.integers(0, 2**31), rows=st.sampled_from([1, 2, 7, 64, 1000]), exponent=st.integers(-30, 30))
@settings(max_examples=60, deadline=None)
def test_it_computes_the_policy_at_any_batch_and_size_of_observation(
    artifact: PolicyArtifact, policy: GaussianPolicy, seed: int, rows: int, exponent: int
) -> None:
    obs = np.random.default_rng(seed).standard_normal((rows, D)) * 10.0**exponent
    action = artifact.act(obs)
    assert action.dtype == np.float32 and action.shape == (rows, 6)
    np.testing.assert_allclose(action, by_hand(policy, obs.astype(np.float32)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("value", [np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45])
def test_extreme_observations_saturate_as_in_training(artifact: PolicyArtifact, policy: GaussianPolicy, value: float) -> None:
    obs = np.full((2, D), value, np.float32)
    obs[1] = 0
    np.testing.assert_allclose(artifact.act(obs), by_hand(policy, obs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [1, 3, 33])
def test_nan_is_not_hidden_and_stays_in_its_row(artifact: PolicyArtifact, rows: int) -> None:
    for i in range(D):
        obs = np.zeros((rows, D), np.float32)
        obs[rows // 2, i] = np.nan
        broken = np.isnan(artifact.act(obs))
        assert broken[rows // 2].all() and broken.sum() == 6


def test_observations_of_another_shape_are_a_fault(artifact: PolicyArtifact) -> None:
    for shape in ((1, D + 1), (D,), (1, 1, D)):
        with pytest.raises(Fault, match=rf"this policy takes \[N, {D}\]"):
            artifact.act(np.zeros(shape, np.float32))


def test_no_torch_is_imported_to_load_prove_and_act(file: Path) -> None:
    code = (
        "import sys, numpy as np\n"
        "from embodied.deploy.artifact import PolicyArtifact\n"
        f"policy = PolicyArtifact.load({str(file)!r})\n"
        "policy.check_golden()\n"
        f"print(policy.act(np.zeros((1, {D}))).shape, [name for name in sys.modules if name.split('.')[0] == 'torch'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "(1, 6) []", done.stderr


# -- golden cases --------------------------------------------------------------------------------------------------------


def test_golden_cases_hold_in_both_precisions(artifact: PolicyArtifact) -> None:
    artifact.check_golden()
    for case in artifact.metadata["golden"]:
        readings, memory = ({name: np.float32(x) for name, x in case[part].items()} for part in ("readings", "memory"))
        np.testing.assert_allclose(observe(SPEC, readings, memory), case["observation"], atol=1e-5, rtol=0)


def test_no_golden_number_is_idle(artifact: PolicyArtifact) -> None:
    """A value that is zero in every case could be computed wrongly unnoticed."""
    for part in ("observation", "action"):
        assert np.abs([case[part][0] for case in artifact.metadata["golden"]]).max(0).min() > 1e-3


@pytest.mark.parametrize("index", range(len(SPEC.terms)), ids=[term.name for term in SPEC.terms])
def test_golden_check_names_a_changed_scale(file: Path, tmp_path: Path, index: int) -> None:
    def change(_: Any, metadata: dict[str, Any]) -> None:
        metadata["spec"]["terms"][index]["scale"] *= 1.01

    with pytest.raises(Fault, match=f"observation '{SPEC.terms[index].name}'.*off by"):
        PolicyArtifact.load(tampered(file, tmp_path, change)).check_golden()


@pytest.mark.parametrize("index", range(len(SPEC.terms) - 1))
def test_golden_check_names_the_first_of_two_swapped_terms(file: Path, tmp_path: Path, index: int) -> None:
    def change(_: Any, metadata: dict[str, Any]) -> None:
        terms = metadata["spec"]["terms"]
        terms[index], terms[index + 1] = terms[index + 1], terms[index]

    with pytest.raises(Fault, match=f"observation '{SPEC.terms[index + 1].name}'"):
        PolicyArtifact.load(tampered(file, tmp_path, change)).check_golden()


@pytest.mark.parametrize(
    "where", [("readings", "tcp_quat"), ("readings", "socket_quat"), ("memory", "target_quat"), ("command", "target_quat")]
)
def test_golden_check_notices_quaternions_in_another_order(file: Path, tmp_path: Path, where: tuple[str, str]) -> None:
    def change(_: Any, metadata: dict[str, Any]) -> None:
        for case in metadata["golden"]:
            w, x, y, z = case[where[0]][where[1]][0]
            case[where[0]][where[1]] = [[x, y, z, w]]

    with pytest.raises(Fault, match=r"golden case 0: (observation|command target_quat)"):
        PolicyArtifact.load(tampered(file, tmp_path, change)).check_golden()


WEIGHTS = [
    *(f"policy.network.{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")),
    "policy.normaliser.shift",
    "policy.normaliser.inverse_std",
]


@pytest.mark.parametrize("name", WEIGHTS)
def test_golden_check_notices_a_flipped_weight(file: Path, tmp_path: Path, name: str) -> None:
    def change(model: onnx.ModelProto, _: Any) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        values = numpy_helper.to_array(tensor).copy()
        largest = np.unravel_index(np.abs(values).argmax(), values.shape)
        values[largest] *= -1
        tensor.CopyFrom(numpy_helper.from_array(values, name))

    with pytest.raises(Fault, match=r"golden case \d: action\[\d\] is .* expected .*, off by"):
        PolicyArtifact.load(tampered(file, tmp_path, change)).check_golden()


@pytest.mark.parametrize("path", [("action", "translation"), ("action", "rotation"), ("action", "frame")])
def test_golden_check_notices_a_changed_action(file: Path, tmp_path: Path, path: tuple[str, str]) -> None:
    def change(_: Any, metadata: dict[str, Any]) -> None:
        part, key = metadata["spec"][path[0]], path[1]
        part[key] = "base" if key == "frame" else 1.05 * part[key]

    with pytest.raises(Fault, match=r"golden case \d: command target_"):
        PolicyArtifact.load(tampered(file, tmp_path, change)).check_golden()


def test_golden_check_notices_a_nan_that_a_kernel_would_hide(file: Path, tmp_path: Path) -> None:
    """As kernels do that clip with the processor's own maximum: of NaN and 0 it may be 0."""

    def change(model: onnx.ModelProto, _: Any) -> None:
        graph = model.graph
        first = next(node for node in graph.node if "obs" in node.input)
        first.input[list(first.input).index("obs")] = "cleaned"
        nodes = [
            helper.make_node("Constant", [], ["zero"], value=helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0])),
            helper.make_node("IsNaN", ["obs"], ["broken"]),
            helper.make_node("Where", ["broken", "zero", "obs"], ["cleaned"]),
        ]
        for node in reversed(nodes):
            graph.node.insert(0, node)

    policy = PolicyArtifact.load(tampered(file, tmp_path, change))
    with pytest.raises(Fault, match=r"a NaN in observation \[0\] does not reach the actions"):
        policy.check_golden()


# -- what it refuses -----------------------------------------------------------------------------------------------------


def put(value: Any, *path: str | int) -> Change:
    """Metadata with another value at a path."""

    def change(_: Any, metadata: dict[str, Any]) -> None:
        part: Any = metadata
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value

    change.__name__ = f"put {value} at {'.'.join(map(str, path))}"
    return change


def cut(*path: str | int) -> Change:
    """Metadata without what is at a path."""

    def change(_: Any, metadata: dict[str, Any]) -> None:
        part: Any = metadata
        for key in path[:-1]:
            part = part[key]
        del part[path[-1]]

    change.__name__ = f"cut {'.'.join(map(str, path))}"
    return change


def drop_metadata(model: onnx.ModelProto, _: Any) -> None:
    del model.metadata_props[:]


def break_metadata(model: onnx.ModelProto, metadata: dict[str, Any]) -> None:
    model.metadata_props[0].key = "spoilt"
    entry = model.metadata_props.add()
    entry.key, entry.value = "embodied", "keep"


def rename_input(model: onnx.ModelProto, _: Any) -> None:
    model.graph.input[0].name = "observation"
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = "observation" if name == "obs" else name


def fix_batch(model: onnx.ModelProto, _: Any) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1


def second_output(model: onnx.ModelProto, _: Any) -> None:
    model.graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, ["N", 6]))
    model.graph.node.append(helper.make_node("Identity", ["action"], ["more"]))


def break_weight(value: float) -> Change:
    def change(model: onnx.ModelProto, _: Any) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "policy.network.2.weight")
        values = numpy_helper.to_array(tensor).copy()
        values[3, 4] = value
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

    return change


def move_weights_out(model: onnx.ModelProto, _: Any) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")


def unknown_operator(model: onnx.ModelProto, _: Any) -> None:
    for node in model.graph.node:
        if node.op_type == "Tanh":
            node.op_type, node.domain = "Foo", "elsewhere"
    model.opset_import.append(helper.make_opsetid("elsewhere", 1))


REFUSED: list[tuple[Change, str]] = [
    (drop_metadata, r"no metadata 'embodied'.*embodied export checkpoint="),
    (break_metadata, r"metadata 'embodied' is damaged"),
    (put(2, "format"), r"has format 2, expected 1: export it again"),
    (put(3, "history"), r"wants 3 observations at once, expected 1"),
    (put("xyzw", "spec", "quaternion"), r"order 'xyzw', expected 'wxyz'"),
    (cut("spec", "robot", "tcp"), r"lacks or misnames something .*tcp"),
    (put("positon", "spec", "terms", 0, "kind"), r"did you mean 'position'"),
    (cut("versions"), r"lacks or misnames something \('versions'\)"),
    (cut("spec", "terms", 0), rf"computes obs float32 \[N, {D}\] -> action .* but its specification says obs \[N, {D - 3}\]"),
    (rename_input, r"computes observation float32"),
    (fix_batch, rf"computes obs float32 \[1, {D}\]"),
    (second_output, r"action float32 \[N, 6\], more float32 \[N, 6\]"),
    (break_weight(np.nan), r"'policy.network.2.weight' holds values that are not finite: export an earlier checkpoint"),
    (break_weight(np.inf), r"'policy.network.2.weight' holds values that are not finite"),
    (move_weights_out, r"keeps '.*' in another file"),
    (put([], "golden"), r"has no golden cases"),
    (cut("golden", 1, "readings", "socket_quat"), r"golden case 1 has no 'readings.socket_quat' of shape \[1, 4\]"),
    (put([[0.0] * 6, [0.0]], "golden", 2, "action"), r"golden case 2 has no 'action' of shape \[1, 6\]"),
    (put([[0.0, "x", 0.0]], "golden", 0, "memory", "target_pos"), r"case 0 has no 'memory.target_pos' of shape \[1, 3\]"),
    (unknown_operator, r"cannot run here"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), REFUSED, ids=[change.__name__ for change, _ in REFUSED])
def test_a_file_that_is_not_right_is_refused_in_one_line(file: Path, tmp_path: Path, change: Change, said: str) -> None:
    path = tampered(file, tmp_path, change)
    with pytest.raises(BadInput, match=said) as caught:
        PolicyArtifact.load(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + bytes(100), None])
def test_what_is_no_onnx_is_refused(file: Path, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "policy.onnx"
    path.write_bytes(file.read_bytes()[:-1000] if content is None else content)
    with pytest.raises(BadInput, match=r"is not ONNX, or damaged .*`embodied export checkpoint=<run>` writes one"):
        PolicyArtifact.load(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"there is no such file: `embodied export checkpoint=<run>` writes one"):
        PolicyArtifact.load(tmp_path / "policy.onnx")
    with pytest.raises(BadInput, match="Is a directory"):
        PolicyArtifact.load(tmp_path)


def test_sha256_is_that_of_the_file(artifact: PolicyArtifact, file: Path) -> None:
    done = subprocess.run(["sha256sum", file], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == artifact.sha256


# -- policy and robot ----------------------------------------------------------------------------------------------------


def differ(robot: ArmSpec) -> list[str]:
    return differences(SPEC, robot, READINGS, COMMANDS)


def other(value: Any) -> Any:
    """Something like it, but different, for values of any specification."""
    match value:
        case str():
            return f"other {value}"
        case float():
            return value + 0.125
        case tuple():
            return (other(value[0]), *value[1:])
    raise AssertionError(f"a specification now holds {type(value)}: say here how to change it")


def test_a_robot_like_the_policys_differs_in_nothing() -> None:
    assert differ(ROBOT) == []
    assert differ(ArmSpec.from_dict(json.loads(json.dumps(dataclasses.asdict(ROBOT))))) == []
    assert differences(SPEC, ROBOT, READINGS | {"temperature": 1}, COMMANDS | {"gripper": 1}) == []


def changes() -> dict[str, tuple[ArmSpec, Any, Any]]:
    """Every field of every part of an ArmSpec, changed alone: by name, with the values before and after."""
    found = {}
    for field in (field for field in dataclasses.fields(ArmSpec) if field.init):
        value = getattr(ROBOT, field.name)
        if field.name == "joints":
            for inner in dataclasses.fields(JointSpec):
                before = getattr(value[2], inner.name)
                joint = replace(value[2], **{inner.name: other(before)})
                robot = replace(ROBOT, joints=(*value[:2], joint, *value[3:]))
                found[f"joint 'fr3_joint3' {inner.name}"] = robot, before, other(before)
        elif dataclasses.is_dataclass(value):
            assert isinstance(value, ImpedanceSpec | MotionSpec)
            for inner in dataclasses.fields(value):
                before = getattr(value, inner.name)
                part = replace(value, **{inner.name: other(before)})
                found[f"{field.name}.{inner.name}"] = replace(ROBOT, **{field.name: part}), before, other(before)
        else:
            found[field.name] = replace(ROBOT, **{field.name: other(value)}), value, other(value)
    return found


OWN_LINES = ("joint 'fr3_joint3' name", "impedance.null_damping")


@pytest.mark.parametrize("name", [name for name in changes() if name not in OWN_LINES])
def test_every_changed_field_is_named_with_both_values(name: str) -> None:
    robot, before, after = changes()[name]
    (line,) = differ(robot)
    assert line.startswith(f"{name}: ") and line.count(": ") >= 2
    assert str(before) in line and str(after) in line


def test_fields_with_a_line_of_their_own() -> None:
    missing, extra = differ(changes()[OWN_LINES[0]][0])[:2]
    assert "'fr3_joint3'" in missing and "'other fr3_joint3'" in extra
    (line,) = differ(changes()[OWN_LINES[1]][0])
    assert "joint 'fr3_joint1'" in line and "1.0" in line and "1.125" in line


@given(order=st.permutations(range(7)))
@settings(max_examples=50, deadline=None)
def test_the_order_of_joints_is_no_difference(order: list[int]) -> None:
    damping = tuple(ROBOT.impedance.null_damping[i] for i in order)
    shuffled = replace(
        ROBOT,
        joints=tuple(ROBOT.joints[i] for i in order),
        impedance=replace(ROBOT.impedance, null_damping=damping),
    )
    assert differ(shuffled) == []
    # but it is one that values belong to joints: exchanged dampings are named by joint
    mixed = replace(shuffled, impedance=ROBOT.impedance)
    wrong = {joint.name for joint, d, e in zip(shuffled.joints, ROBOT.impedance.null_damping, damping, strict=True) if d != e}
    assert {re.findall(r"joint '(\w+)'", line)[0] for line in differ(mixed)} == wrong


def test_missing_extra_and_doubled_joints_are_named() -> None:
    shorter = replace(
        ROBOT, joints=ROBOT.joints[:-1], impedance=replace(ROBOT.impedance, null_damping=ROBOT.impedance.null_damping[:-1])
    )
    (line,) = differ(shorter)
    assert line.startswith("joint 'fr3_joint7': ") and "has" in line
    (line,) = differ(replace(ROBOT, joints=ROBOT.joints[:-1], impedance=ROBOT.impedance))[1:]
    assert line == "impedance.null_damping: the robot has 7 values for 6 joints: give one a joint"
    doubled = replace(ROBOT, joints=(*ROBOT.joints[:-1], ROBOT.joints[0]))
    assert any("'fr3_joint1': the robot names it 2 times" in line for line in differ(doubled))


@pytest.mark.parametrize("name", READINGS)
def test_missing_and_misshapen_readings_are_named(name: str) -> None:
    (line,) = differences(SPEC, ROBOT, {key: size for key, size in READINGS.items() if key != name}, COMMANDS)
    assert line.startswith(f"reading '{name}': ") and f"({READINGS[name]} numbers)" in line
    (line,) = differences(SPEC, ROBOT, READINGS | {name: 11}, COMMANDS)
    assert line.startswith(f"reading '{name}': ") and "gives 11" in line


@pytest.mark.parametrize("name", COMMANDS)
def test_missing_and_misshapen_commands_are_named(name: str) -> None:
    (line,) = differences(SPEC, ROBOT, READINGS, {key: size for key, size in COMMANDS.items() if key != name})
    assert line.startswith(f"command '{name}': ")
    (line,) = differences(SPEC, ROBOT, READINGS, COMMANDS | {name: 7})
    assert line.startswith(f"command '{name}': ") and "takes 7" in line


def test_needed_readings() -> None:
    assert READINGS == {
        "tcp_pos": 3, "tcp_quat": 4, "tcp_linvel": 3, "tcp_angvel": 3, "force": 3, "torque": 3,
        "joint_pos": 7, "joint_vel": 7, "socket_pos": 3, "socket_quat": 4,
    }  # fmt: skip


class Recorded(dict):
    """Readings that remember what was asked of them."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)


def test_needed_readings_are_those_that_observing_asks_for() -> None:
    """For terms of every kind, seen from and of a second frame."""
    from embodied.spec.policy import FRAMED, TERM_SIZES

    terms = [Term(kind, kind, "1", 1.0, of="hand", frame="tray" if kind in FRAMED else "base") for kind in TERM_SIZES]
    spec: PolicySpec = replace(SPEC, terms=tuple(terms))
    sizes = needed_readings(spec)
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal((2, size)) for name, size in sizes.items()}
    memory = {name: rng.standard_normal((2, size)) for name, size in kept(spec).items()}
    readings = Recorded(values)
    assert observe(spec, readings, memory).shape == (2, spec.obs_size)
    assert {"hand_pos", "hand_quat", "tray_pos", "tray_quat", "hand_linvel", "hand_angvel"} <= readings.asked
    assert readings.asked <= set(sizes)
