"""An exported policy as a robot's control process uses it: numpy and onnxruntime, never torch.

The file is ONNX: `obs` float32 [N, D] -> `action` float32 [N, A], the normaliser inside. Its metadata property `embodied` is
one JSON document: what the policy sees and commands (`PolicySpec`), where it comes from, and golden cases: real readings and
memory with the observation, action and command that belong to them, so that another machine can prove that it computes the
same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from embodied.spec.errors import BadInput, Fault, nearest
from embodied.spec.observe import command, observe
from embodied.spec.policy import JointTargets, PolicySpec, Term, ToolMotion, of_arm
from embodied.spec.robot import ArmSpec

FORMAT = 1
KEY = "embodied"
TOLERANCE = 1e-5
"""Largest difference of an observation, action [1], position [m] or quaternion component that still counts as the same."""
AGAIN = "`embodied export checkpoint=<run>` writes one"

_VECTORS = ("tcp_pos", "tcp_linvel", "tcp_angvel", "force", "torque")


def needed_readings(spec: PolicySpec) -> dict[str, int]:
    """Names and sizes of the readings that observing, commanding, judging success and guarding the robot take."""
    joints, sizes = len(spec.robot.joints), {}
    if isinstance(spec.robot, ArmSpec):
        sizes = dict.fromkeys(_VECTORS, 3) | {"tcp_quat": 4, "joint_pos": joints, "joint_vel": joints}
        for frame in spec.frames:
            sizes |= {f"{frame}_pos": 3, f"{frame}_quat": 4}
    for term in spec.terms:
        sizes |= _readings_of(term, joints)
    return sizes


def _readings_of(term: Term, joints: int) -> dict[str, int]:
    """Names and sizes of the readings that one term takes."""
    own = {
        "position": {f"{term.of}_pos": 3},
        "linear_velocity": {f"{term.of}_linvel": 3},
        "angular_velocity": {f"{term.of}_angvel": 3},
        "rotation": {f"{term.of}_quat": 4},
        "rotation_matrix": {f"{term.of}_quat": 4},
        "gravity": {f"{term.of}_quat": 4},
        "gyro": {"gyro": 3},
        "joint_position": {"joint_pos": joints},
        "joint_velocity": {"joint_vel": joints},
        "request": {"request": term.count},
        "heights": {"heights": term.count},
    }.get(term.kind, {})
    if term.frame != "base":
        own |= {f"{term.frame}_quat": 4} | ({f"{term.frame}_pos": 3} if term.kind == "position" else {})
    return own


def commands(spec: PolicySpec) -> dict[str, int]:
    """Names and sizes of what a policy commands."""
    if isinstance(spec.action, ToolMotion):
        return {"target_pos": 3, "target_quat": 4}
    return {"target_joints" if isinstance(spec.action, JointTargets) else "rotor_speeds": spec.action.size}


def kept(spec: PolicySpec) -> dict[str, int]:
    """Names and sizes of what is remembered from one control step to the next."""
    history = {"past_actions": spec.history * spec.action.size} if spec.history else {}
    clock = {"time": 1} if spec.clock else {}
    return (commands(spec) if isinstance(spec.action, ToolMotion) else {}) | {"last_action": spec.action.size} | history | clock


@dataclass(frozen=True)
class PolicyArtifact:
    """An exported policy.

    Attributes:
        spec: what it sees and commands.
        metadata: the whole JSON document of the file.
        sha256: of the file.
    """

    spec: PolicySpec
    metadata: dict[str, Any]
    sha256: str
    _session: Any = field(repr=False)

    @classmethod
    def load(cls, path: Path | str) -> PolicyArtifact:
        """Read and check a file that `embodied export` wrote.

        Raises:
            BadInput: it is missing, not ONNX, not an export of ours, of another format, incomplete, or its weights are broken.
        """
        path = Path(path)
        data = _read(path)
        model = _parse(path, data)
        metadata = _metadata(path, model)
        spec = _spec(path, metadata)
        _check_interface(path, model, spec)
        _check_weights(path, model)
        _check_cases(path, metadata, spec)
        return cls(spec, metadata, hashlib.sha256(data).hexdigest(), _session(path, data))

    def act(self, obs: NDArray[Any]) -> NDArray[np.float32]:
        """The deterministic action [N, A] for observations [N, D], rounded to float32; NaN comes out where NaN went in.

        Raises:
            Fault: the observations have another shape.
        """
        if obs.ndim != 2 or obs.shape[1] != self.spec.obs_size:
            raise Fault(f"observations of shape {obs.shape}: this policy takes [N, {self.spec.obs_size}]")
        action: NDArray[np.float32] = self._session.run(["action"], {"obs": np.ascontiguousarray(obs, np.float32)})[0]
        return action

    def check_golden(self) -> None:
        """Prove that this machine computes the chain from readings to commands as the exporting one did.

        Each stage starts from the golden values of the one before, so that no stage magnifies what is tolerated before it.

        Raises:
            Fault: something differs by more than 1e-5, or a NaN in an observation does not reach every action.
        """
        for number, case in enumerate(self.metadata["golden"]):
            readings, memory = _arrays(case["readings"]), _arrays(case["memory"])
            seen, action = np.array(case["observation"]), np.array(case["action"])
            for term, got, want in zip(
                self.spec.terms, self._terms(observe(self.spec, readings, memory)), self._terms(seen), strict=True
            ):
                self._compare(number, f"observation '{term.name}'", got, want)
            self._compare(number, "action", self.act(seen), action)
            commanded = command(self.spec, action, readings, memory)
            for name in commands(self.spec):
                self._compare(number, f"command {name}", commanded[name], np.array(case["command"][name]))
        broken = np.zeros((self.spec.obs_size, self.spec.obs_size), np.float32)
        np.fill_diagonal(broken, np.nan)
        hidden = np.flatnonzero(~np.isnan(self.act(broken)).all(1))
        if len(hidden):
            raise Fault(f"a NaN in observation [{hidden[0]}] does not reach the actions: use another version of onnxruntime")

    def _terms(self, obs: NDArray[Any]) -> list[NDArray[Any]]:
        return np.split(obs, np.cumsum(self.spec.sizes)[:-1], axis=1)

    def _compare(self, number: int, what: str, got: NDArray[Any], want: NDArray[Any]) -> None:
        off = np.abs(got - want)[0]
        wrong = np.flatnonzero(~(off <= TOLERANCE))
        if len(wrong):
            i = wrong[0]
            raise Fault(
                f"golden case {number}: {what}[{i}] is {got[0, i]:.7g}, expected {want[0, i]:.7g}, off by {off[i]:.2g} "
                f"(allowed {TOLERANCE:g}): the file was changed, or embodied {self.metadata['versions']['embodied']}, which "
                "wrote it, computes otherwise than this one: export the policy again"
            )


def differences(spec: PolicySpec, robot: ArmSpec, readings: Mapping[str, int], takes: Mapping[str, int]) -> list[str]:
    """What keeps a policy from running on a robot: a line for each difference, both values named, and what to do.

    The order of joints may differ: whoever runs the policy maps them by name.

    Args:
        spec: what the policy was made for.
        robot: what the robot says of itself.
        readings: names and sizes of the readings that the robot gives.
        takes: names and sizes of the commands that it takes.

    Returns:
        An empty list where the policy may run.
    """
    made, _ = of_arm(spec)
    lines = []
    for option in fields(ArmSpec):
        ours, theirs = getattr(made, option.name), getattr(robot, option.name)
        if option.name == "joints":
            lines += _joint_differences(made, robot)
        elif is_dataclass(ours):
            for inner in fields(ours):
                name = f"{option.name}.{inner.name}"
                if name == "impedance.null_damping":
                    lines += _null_damping_differences(made, robot)
                else:
                    lines += _differ(name, getattr(ours, inner.name), getattr(theirs, inner.name), option.name)
        else:
            lines += _differ(option.name, ours, theirs, option.name)
    return [
        *lines,
        *_offer_differences("reading", "gives", needed_readings(spec), readings, "add a sensor, calibration or estimate of it"),
        *_offer_differences("command", "takes", commands(spec), takes, "use a bridge that takes Cartesian targets"),
    ]


_MENDS = {
    "name": "use that robot, or train a policy for this one",
    "joints": "set the robot's limits so, or train with the robot's",
    "tcp": "mount the tool that has this frame, or train with the robot's",
    "physics_dt": "describe the robot with the step of the simulator that the policy was trained in",
}
_SET = "set the robot so, or train with the robot's"


def _differ(what: str, ours: Any, theirs: Any, key: str) -> list[str]:
    if ours == theirs:
        return []
    return [f"{what}: the policy was made for {_text(ours)}, the robot has {_text(theirs)}: {_MENDS.get(key, _SET)}"]


def _text(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


def _joint_differences(made: ArmSpec, robot: ArmSpec) -> list[str]:
    ours = {joint.name: joint for joint in made.joints}
    theirs = {joint.name: joint for joint in robot.joints}
    lines = [
        f"joint '{name}': the robot names it {robot.joint_names.count(name)} times, the policy {made.joint_names.count(name)}: "
        "name every joint once"
        for name in sorted({*ours, *theirs})
        if robot.joint_names.count(name) > 1 or made.joint_names.count(name) > 1
    ]
    for name in [name for name in ours if name not in theirs]:
        given = nearest(name, [other for other in theirs if other not in ours] or theirs)
        lines.append(f"joint '{name}': the policy was made for it, the robot has no such joint ({given}): name joints alike")
    for name in [name for name in theirs if name not in ours]:
        lines.append(f"joint '{name}': the robot has it, the policy was made without: name joints alike, or leave it out")
    for name in [name for name in ours if name in theirs]:
        for option in fields(ours[name]):
            one, other = getattr(ours[name], option.name), getattr(theirs[name], option.name)
            lines += _differ(f"joint '{name}' {option.name}", one, other, "joints")
    return lines


def _null_damping_differences(made: ArmSpec, robot: ArmSpec) -> list[str]:
    values = robot.impedance.null_damping
    if len(values) != len(robot.joints):
        return [f"impedance.null_damping: the robot has {len(values)} values for {len(robot.joints)} joints: give one a joint"]
    ours = dict(zip(made.joint_names, made.impedance.null_damping, strict=True))
    theirs = dict(zip(robot.joint_names, values, strict=True))
    lines = []
    for name in [name for name in ours if name in theirs]:
        lines += _differ(f"impedance.null_damping of joint '{name}'", ours[name], theirs[name], "impedance")
    return lines


def _offer_differences(kind: str, verb: str, needed: Mapping[str, int], offered: Mapping[str, int], mend: str) -> list[str]:
    lines = []
    for name, size in needed.items():
        if name not in offered:
            lines.append(f"{kind} '{name}': the policy needs it ({size} numbers), the robot {verb} none of that name: {mend}")
        elif offered[name] != size:
            lines.append(f"{kind} '{name}': the policy needs {size} numbers, the robot {verb} {offered[name]}: {mend}")
    return lines


# -- reading a file ------------------------------------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise BadInput(f"policy {path}: there is no such file: {AGAIN}") from None
    except OSError as error:
        raise BadInput(f"policy {path} cannot be read ({error.strerror}): expected an ONNX file: {AGAIN}") from error


def _parse(path: Path, data: bytes) -> onnx.ModelProto:
    try:
        model = onnx.load_model_from_string(data)
        for tensor in model.graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                raise BadInput(f"policy {path} keeps '{tensor.name}' in another file, expected everything in one: {AGAIN}")
        onnx.checker.check_model(model)
    except (DecodeError, onnx.checker.ValidationError) as error:
        raise BadInput(f"policy {path} is not ONNX, or damaged ({_line(error)}): {AGAIN}") from error
    return model


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:120]


def _metadata(path: Path, model: onnx.ModelProto) -> dict[str, Any]:
    text = {entry.key: entry.value for entry in model.metadata_props}.get(KEY)
    if text is None:
        raise BadInput(f"policy {path} does not say what it sees and commands (no metadata '{KEY}'): {AGAIN}")
    try:
        metadata = json.loads(text)
        found = metadata["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"policy {path}: its metadata '{KEY}' is damaged ({_line(error)}): {AGAIN}") from error
    if found != FORMAT:
        raise BadInput(f"policy {path} has format {found}, expected {FORMAT}: export it again with this version of embodied")
    return dict(metadata)


def _spec(path: Path, metadata: dict[str, Any]) -> PolicySpec:
    try:
        spec = PolicySpec.from_dict(metadata["spec"])
        history, _ = metadata["history"], metadata["versions"]["embodied"]
    except (KeyError, TypeError, ValueError, BadInput) as error:
        raise BadInput(f"policy {path}: its metadata lacks or misnames something ({_line(error)}): {AGAIN}") from error
    if spec.quaternion != "wxyz":
        raise BadInput(f"policy {path} has quaternions in the order '{spec.quaternion}', expected 'wxyz': {AGAIN}")
    if history != 1:
        raise BadInput(f"policy {path} wants {history} observations at once, expected 1: no policy of embodied has a history")
    return spec


def _check_interface(path: Path, model: onnx.ModelProto, spec: PolicySpec) -> None:
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    wanted = f"obs [N, {spec.obs_size}] -> action [N, {spec.action.size}], float32"
    found = f"{', '.join(map(_shape, inputs))} -> {', '.join(map(_shape, graph.output))}"
    good = [_shape(value) for value in (*inputs, *graph.output)] == [
        f"obs float32 [N, {spec.obs_size}]",
        f"action float32 [N, {spec.action.size}]",
    ]
    if not good or len(inputs) != 1:
        raise BadInput(f"policy {path} computes {found}, but its specification says {wanted}: {AGAIN}")


def _shape(value: onnx.ValueInfoProto) -> str:
    kind = value.type.tensor_type
    element = "float32" if kind.elem_type == onnx.TensorProto.FLOAT else onnx.TensorProto.DataType.Name(kind.elem_type).lower()
    sizes = [str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in kind.shape.dim]
    return f"{value.name} {element} [{', '.join(sizes)}]"


def _check_weights(path: Path, model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        if not np.isfinite(onnx.numpy_helper.to_array(tensor)).all():
            raise BadInput(f"policy {path}: '{tensor.name}' holds values that are not finite: export an earlier checkpoint")


def _check_cases(path: Path, metadata: dict[str, Any], spec: PolicySpec) -> None:
    """Golden cases are there, with everything that the chain needs, in the right sizes."""
    sizes = {
        **{f"readings.{name}": size for name, size in needed_readings(spec).items()},
        **{f"memory.{name}": size for name, size in kept(spec).items()},
        **{f"command.{name}": size for name, size in commands(spec).items()},
        "observation": spec.obs_size,
        "action": spec.action.size,
    }
    cases = metadata.get("golden")
    if not isinstance(cases, list) or not cases:
        raise BadInput(f"policy {path} has no golden cases to prove it by: {AGAIN}")
    for number, case in enumerate(cases):
        for name, size in sizes.items():
            value: Any = case
            for part in name.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if not _is_row(value, size):
                raise BadInput(f"policy {path}: golden case {number} has no '{name}' of shape [1, {size}]: {AGAIN}")


def _is_row(value: Any, size: int) -> bool:
    """Whether it is a batch of one: [[x, ...]] with so many numbers."""
    row = value[0] if isinstance(value, list) and len(value) == 1 else None
    return isinstance(row, list) and len(row) == size and all(isinstance(x, int | float) for x in row)


def _arrays(values: dict[str, Any]) -> dict[str, NDArray[np.float64]]:
    return {name: np.array(value, np.float64) for name, value in values.items()}


def _session(path: Path, data: bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what goes wrong is raised, and said once
    try:
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class but this
        raise BadInput(f"policy {path} cannot run here ({_line(error)}): {AGAIN}") from error
