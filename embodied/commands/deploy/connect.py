"""What the commands that bring a policy to a robot share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodied.deploy.artifact import PolicyArtifact, differences
from embodied.deploy.link import Link
from embodied.spec.errors import BadInput
from embodied.spec.policy import of_arm


def load_policy(path: str) -> PolicyArtifact:
    """The exported policy at a path; a run's folder means the policy.onnx in it.

    Raises:
        BadInput: see `PolicyArtifact.load`; or it is not for an arm: no other robot can be driven yet.
    """
    file = Path(path).expanduser()
    policy = PolicyArtifact.load(file / "policy.onnx" if file.is_dir() else file)
    of_arm(policy.spec)
    return policy


def mismatches(policy: PolicyArtifact, link: Link, description: dict[str, Any]) -> list[str]:
    """Everything that keeps `policy` from running on the robot that described itself, a line each."""
    found = differences(policy.spec, link.robot, description["readings"], description["commands"])
    for name, size in (("target_pos", 3), ("target_quat", 4)):
        if description["readings"].get(name) != size:
            found.append(f"reading '{name}' ({size}): the robot does not say which target it keeps")
    return found


def refuse_mismatch(policy: PolicyArtifact, link: Link, description: dict[str, Any], path: str) -> None:
    """Refuse a policy that was made for another robot.

    Raises:
        BadInput: the first difference; `embodied deploy check` lists them all.
    """
    found = mismatches(policy, link, description)
    if found:
        more = f" ({len(found) - 1} more: embodied deploy check policy={path})" if len(found) > 1 else ""
        raise BadInput(f"{path} does not fit this robot: {found[0]}{more}")
