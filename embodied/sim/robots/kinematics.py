"""Forward and inverse kinematics of `Arm` tables, batched, float64: for placing arms, not for simulating them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embodied.sim.robots.arm import Arm
from embodied.spec.rotations import quat_conjugate, quat_multiply, quat_to_rotvec, rotate


def forward(arm: Arm, joints: Tensor, tool_length: float) -> tuple[Tensor, Tensor, Tensor]:
    """Pose of the tcp and its geometric Jacobian, by modified Denavit-Hartenberg parameters (Craig's convention).

    Args:
        arm: the arm's table.
        joints: joint positions [N, J] in rad.
        tool_length: from the grasp point to the tcp [m].

    Returns:
        Position [N, 3] m, orientation [N, 4] wxyz, Jacobian [N, 6, J] (linear, then angular), in the base frame.
    """
    count = joints.shape[0]
    pos = joints.new_zeros(count, 3)
    quat = joints.new_tensor([1.0, 0.0, 0.0, 0.0]).expand(count, 4)
    unit_z = joints.new_tensor([0.0, 0.0, 1.0]).expand(count, 3)
    axes, origins = [], []
    for i, link in enumerate(arm.links):
        sine, cosine = math.sin(link.alpha), math.cos(link.alpha)
        offset = joints.new_tensor([link.a, -link.d * sine, link.d * cosine]).expand(count, 3)
        pos = pos + rotate(quat, offset)
        twist = joints.new_tensor([math.cos(link.alpha / 2), math.sin(link.alpha / 2), 0.0, 0.0]).expand(count, 4)
        quat = quat_multiply(quat, twist)
        axes.append(rotate(quat, unit_z))
        origins.append(pos)
        half = joints[:, i] / 2
        zero = torch.zeros_like(half)
        quat = quat_multiply(quat, torch.stack([half.cos(), zero, zero, half.sin()], -1))
    reach = arm.hand.flange + arm.hand.grasp + tool_length
    pos = pos + rotate(quat, unit_z * reach)
    half_turn = arm.hand.turn / 2
    turn = joints.new_tensor([math.cos(half_turn), 0.0, 0.0, math.sin(half_turn)]).expand(count, 4)
    quat = quat_multiply(quat, turn)
    columns = [torch.cat([torch.linalg.cross(axis, pos - at), axis], -1) for axis, at in zip(axes, origins, strict=True)]
    return pos, quat, torch.stack(columns, -1)


def inverse(
    arm: Arm, pos: Tensor, quat: Tensor, tool_length: float, iterations: int = 30, damping: float = 1e-3
) -> tuple[Tensor, Tensor]:
    """Joint positions that bring the tcp to a pose, by damped least squares from the rest pose.

    Args:
        arm: the arm's table.
        pos: wanted positions [N, 3] in m.
        quat: wanted orientations [N, 4] wxyz.
        tool_length: from the grasp point to the tcp [m].
        iterations: Newton steps.
        damping: of the least squares, dimensionless.

    Returns:
        Joint positions [N, J] float64, and bool [N]: within 0.01 mm and 0.1 mrad of the pose, inside the joint limits.
    """
    pos, quat = pos.double(), quat.double()
    joints = pos.new_tensor(arm.spec.home).repeat(pos.shape[0], 1)
    eye = damping**2 * torch.eye(6, dtype=torch.float64)
    for _ in range(iterations):
        error, jacobian = _error(arm, joints, pos, quat, tool_length)
        step = torch.linalg.solve(jacobian @ jacobian.mT + eye, error[..., None])
        joints = joints + (jacobian.mT @ step)[..., 0]
    error, _ = _error(arm, joints, pos, quat, tool_length)
    close = (error[:, :3].norm(dim=-1) < 1e-5) & (error[:, 3:].norm(dim=-1) < 1e-4)
    lower = pos.new_tensor([joint.lower for joint in arm.spec.joints])
    upper = pos.new_tensor([joint.upper for joint in arm.spec.joints])
    return joints, close & ((joints > lower) & (joints < upper)).all(-1)


def _error(arm: Arm, joints: Tensor, pos: Tensor, quat: Tensor, tool_length: float) -> tuple[Tensor, Tensor]:
    at, orientation, jacobian = forward(arm, joints, tool_length)
    turn = quat_to_rotvec(quat_multiply(quat, quat_conjugate(orientation)))
    return torch.cat([pos - at, turn], -1), jacobian
