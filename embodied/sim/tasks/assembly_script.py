"""A script for the assembly task: it goes by where the socket is taken to be, and commands no more than a policy may."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.spec.observe import turn_about_z
from embodied.spec.policy import PolicySpec, ToolMotion, of_arm
from embodied.spec.rotations import quat_conjugate, quat_multiply, quat_to_rotvec, rotate, rotate_inverse

ABOVE = 0.002  # of the mouth, where the tool is aligned [m]
BESIDE, TURNED = 0.0007, 0.03  # what counts as aligned [m, rad]
PUSH = 0.006  # how far ahead of the tip its target is as it goes in [m]
OVER = 0.1  # a part that locks is turned beyond what suffices [rad]


def insert(spec: PolicySpec, truth: dict[str, Tensor], state: dict[str, Tensor]) -> Tensor:
    """Actions [N, 6] in [-1, 1]: align the tool just above the mouth, push it in, and turn at the bottom what locks.

    Args:
        spec: of the task's policy.
        truth: readings: of the socket, what the script goes by.
        state: the task's, of each world: where the tool's target is, and in which frame actions are taken.
    """
    _, success = of_arm(spec)
    action = spec.action
    assert isinstance(action, ToolMotion)
    socket_pos, socket = truth["socket_pos"], truth["socket_quat"]
    at = rotate_inverse(socket, truth["tcp_pos"] - socket_pos)
    target = rotate_inverse(socket, state["target_pos"] - socket_pos)
    turned = quat_multiply(quat_conjugate(socket), truth["tcp_quat"])
    target_turned = quat_multiply(quat_conjugate(socket), state["target_quat"])

    twist, tilt = turn_about_z(turned), quat_to_rotvec(turned)[:, :2].norm(dim=-1)
    aligned = (at[:, :2].norm(dim=-1) < BESIDE) & (tilt < TURNED) & (twist.abs() < TURNED)
    inside = at[:, 2] > 0.0005
    depth = torch.where(aligned | inside, at[:, 2] + PUSH, -ABOVE)
    wanted = torch.zeros_like(twist)
    if success.turn is not None:
        bottom = (at[:, 2] > success.depth) | ((twist > 0.2) & inside)
        wanted = torch.where(bottom, success.turn + OVER, 0.0)
    to = torch.stack([(wanted / 2).cos(), 0 * wanted, 0 * wanted, (wanted / 2).sin()], -1)
    move = torch.cat([-target[:, :2], (depth - target[:, 2])[:, None]], -1)
    turn = quat_to_rotvec(quat_multiply(to, quat_conjugate(target_turned)))
    # actions are taken in the frame of the socket as it is seen
    move, turn = (rotate_inverse(state["seen_quat"], rotate(socket, x)) for x in (move, turn))
    return torch.cat([move / action.translation, turn / action.rotation], -1).clamp(-1.0, 1.0)
