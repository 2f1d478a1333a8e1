"""From a trained policy to one self-describing ONNX file, checked before it is kept. The side with torch."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from embodied import __version__
from embodied.deploy.artifact import FORMAT, KEY, TOLERANCE, PolicyArtifact, commands
from embodied.spec.errors import BadInput, Fault
from embodied.spec.observe import command, observe
from embodied.spec.policy import PolicySpec

OPSET = 17  # has all that a policy needs, and every onnxruntime since 1.13 runs it


@dataclass(frozen=True)
class Case:
    """A real moment of an episode: the readings and the memory that the policy acted on, float32 tensors [1, n] by name."""

    readings: Mapping[str, Tensor]
    memory: Mapping[str, Tensor]


@dataclass(frozen=True)
class Origin:
    """Where a policy comes from: signature of the engine it was trained on, hash of its weights, how far training had come."""

    engine: str
    weights_sha256: str
    iteration: int
    env_steps: int


@dataclass(frozen=True)
class Exported:
    """A file that was written: its hash, and how far onnxruntime and torch differed on how many observations."""

    policy: Path
    sha256: str
    weights_sha256: str
    max_difference: float
    observations: int


def write_policy(
    policy: nn.Module, spec: PolicySpec, origin: Origin, cases: Sequence[Case], observations: Tensor, out: Path
) -> Exported:
    """Write `policy` so that a kill at any moment leaves either nothing or a whole, checked file. Equal inputs, equal bytes.

    Args:
        policy: a `Policy` of one step, without memory of its own, on the CPU.
        spec: what it sees and commands.
        origin: where it comes from.
        cases: moments that become the golden cases.
        observations: float32 [M, D] on which onnxruntime must agree with torch.
        out: the file; one of that name is replaced.

    Raises:
        BadInput: the policy's weights are not finite.
        Fault: onnxruntime differs from torch by more than 1e-5, or the file cannot be written; there is no file then.
    """
    for name, value in policy.state_dict().items():
        if not bool(torch.isfinite(value).all()):
            raise BadInput(f"the policy's '{name}' holds values that are not finite: export an earlier checkpoint")
    act = _Deterministic(policy)
    model = trace(act, spec.obs_size)
    metadata = {
        "format": FORMAT,
        "spec": spec.to_dict(),
        "history": 1,
        "engine": _engine(origin.engine),
        "weights_sha256": origin.weights_sha256,
        "training": {"iteration": origin.iteration, "env_steps": origin.env_steps},
        "versions": {"embodied": __version__, "torch": str(torch.__version__), "onnx": onnx.__version__},
        "golden": [_golden(act, spec, case) for case in cases],
    }
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, json.dumps(metadata, allow_nan=False)
    onnx.checker.check_model(model, full_check=True)
    partial = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(partial, model.SerializeToString(deterministic=True))
        artifact = PolicyArtifact.load(partial)
        difference = _difference(artifact, act, observations)
        artifact.check_golden()
        partial.replace(out)
        _sync(out.parent)
    except OSError as error:
        raise Fault(f"{out} cannot be written ({error.strerror}): mend that, or choose another file with out=") from error
    finally:
        partial.unlink(missing_ok=True)
    return Exported(out, artifact.sha256, origin.weights_sha256, difference, len(observations))


class _Deterministic(nn.Module):
    """What evaluation asks of a policy, as a function of one tensor: observations [N, D] to actions [N, A]."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy: Any = policy

    def forward(self, obs: Tensor) -> Tensor:
        return self.policy.act({"policy": obs}, deterministic=True).action[:, 0]


def trace(act: nn.Module, obs_size: int) -> onnx.ModelProto:
    """`act` as an ONNX model: `obs` float32 [N, D] to `action` float32 [N, A], any N.

    By torch's exporter on TorchScript. Its successor on torch.export gives the same graph for such networks, but takes
    seconds instead of a fifth of one, wants onnxscript, warns of torch's own internals, speaks of torchvision on stderr, and
    leaves line numbers and paths in the file.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        file = Path(folder, "traced.onnx")
        # that it is deprecated; DeprecationWarning alone, for the tracer's own warnings would be of our policy
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(
            act,
            (torch.zeros(2, obs_size),),
            file,
            dynamo=False,
            opset_version=OPSET,
            input_names=["obs"],
            output_names=["action"],
            dynamic_axes={"obs": {0: "N"}, "action": {0: "N"}},
        )
        return onnx.load_model(file)


def _golden(act: nn.Module, spec: PolicySpec, case: Case) -> dict[str, Any]:
    """The case with what belongs to it, in double precision: numpy in either precision must come close to it."""
    readings = {name: value.double() for name, value in case.readings.items()}
    memory = {name: value.double() for name, value in case.memory.items()}
    obs = observe(spec, readings, memory).float()
    action = act(obs)
    commanded = command(spec, action.double(), readings, memory)
    return {
        "readings": {name: value.tolist() for name, value in readings.items()},
        "memory": {name: value.tolist() for name, value in memory.items()},
        "observation": obs.tolist(),
        "action": action.tolist(),
        "command": {name: commanded[name].tolist() for name in commands(spec)},
    }


def _engine(signature: str) -> dict[str, str]:
    name, _, rest = signature.partition("-")
    version, _, model = rest.rpartition("-")
    return {"name": name, "version": version, "model": model}


def _difference(artifact: PolicyArtifact, act: nn.Module, observations: Tensor) -> float:
    """The largest difference between the file in onnxruntime and the policy in torch.

    Raises:
        Fault: it is more than 1e-5.
    """
    difference = float(np.abs(artifact.act(observations.numpy()) - act(observations).numpy()).max())
    if not difference <= TOLERANCE:
        raise Fault(
            f"onnxruntime and torch differ by {difference:.2g} on {len(observations)} observations, expected at most "
            f"{TOLERANCE:g}: nothing was written; try other versions of torch and onnxruntime"
        )
    return difference


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
