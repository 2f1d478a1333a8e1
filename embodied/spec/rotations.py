"""Rotations for torch tensors and numpy arrays alike, so that simulator, ONNX export and robot run the same lines.

Quaternions are wxyz, of unit length, [..., 4]; vectors and rotation vectors are [..., 3] (radians).
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

Array = Any
"""A torch tensor or a numpy array."""


def namespace(x: Array) -> Any:
    """The module whose functions take `x`: numpy for an array, else torch (never imported here: who has a tensor has it)."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def clamp(x: Array, low: Any, high: Any) -> Array:
    """X brought inside [low, high]: numbers, or arrays of x's kind."""
    # numpy's own clip takes three times as long for few numbers
    return np.minimum(np.maximum(x, low), high) if isinstance(x, np.ndarray) else x.clamp(low, high)


def like(values: Any, x: Array) -> Array:
    """Numbers as an array of the kind and type that x is."""
    if isinstance(x, np.ndarray):
        return np.asarray(values, x.dtype)
    # many numbers should come as an array: a list is read one by one
    return namespace(x).as_tensor(values, dtype=x.dtype, device=x.device)


def zeros(x: Array, size: int) -> Array:
    """Noughts [N, size] of the kind and type of x [N, ...]."""
    return np.zeros((len(x), size), x.dtype) if isinstance(x, np.ndarray) else x.new_zeros(len(x), size)


# p q = left(p) q = right(q) p: rows of the matrices as components of the quaternion and their signs. For a single robot numpy
# takes microseconds an operation whatever its size, and a product of matrices is one operation
_INDEX = np.array([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])
_LEFT = np.array([[1, -1, -1, -1], [1, 1, -1, 1], [1, 1, 1, -1], [1, -1, 1, 1]], np.float32)
_RIGHT = np.array([[1, -1, -1, -1], [1, 1, 1, -1], [1, -1, 1, 1], [1, 1, -1, 1]], np.float32)


def _products() -> np.ndarray:
    """How the products of components p_i p_j [16] make up the rotation matrix [9]: a matrix [16, 9]."""
    made = np.zeros((4, 4, 3, 3), np.float32)
    for i in range(3):
        j, k = (i + 1) % 3, (i + 2) % 3
        for component, sign in ((0, 1), (1 + i, 1), (1 + j, -1), (1 + k, -1)):
            made[component, component, i, i] = sign
        made[1 + i, 1 + j, i, j] = made[1 + i, 1 + j, j, i] = 2.0
        made[0, 1 + k, i, j], made[0, 1 + k, j, i] = -2.0, 2.0
    return made.reshape(16, 9)


_PRODUCTS = _products()


def _matrix(q: Array) -> Array:
    """The rotation matrix of q, [..., 3, 3]: v turned by q is q v q*; numpy only."""
    parts = q[..., _INDEX]
    return ((parts * _LEFT) @ np.swapaxes(parts * _RIGHT, -1, -2))[..., 1:, 1:]


def quat_multiply(p: Array, q: Array) -> Array:
    """The rotation q followed by p: p q, [..., 4]."""
    if isinstance(p, np.ndarray):
        return ((p[..., _INDEX] * _LEFT) @ q[..., None])[..., 0]
    torch = namespace(p)
    pw, pv, qw, qv = p[..., :1], p[..., 1:], q[..., :1], q[..., 1:]
    scalar = pw * qw - (pv * qv).sum(-1)[..., None]
    return torch.concatenate([scalar, pw * qv + qw * pv + torch.linalg.cross(pv, qv)], -1)


def quat_conjugate(q: Array) -> Array:
    """The inverse rotation, [..., 4]."""
    return namespace(q).concatenate([q[..., :1], -q[..., 1:]], -1)


def rotate(q: Array, v: Array) -> Array:
    """V turned by q: from the frame whose orientation q is, into q's reference frame, [..., 3]."""
    if isinstance(v, np.ndarray):
        return (_matrix(q) @ v[..., None])[..., 0]
    cross = namespace(v).linalg.cross
    axis = q[..., 1:]
    t = cross(axis, 2.0 * v)
    return v + q[..., :1] * t + cross(axis, t)


def rotate_inverse(q: Array, v: Array) -> Array:
    """V turned back by q: from q's reference frame into the frame whose orientation q is, [..., 3]."""
    if isinstance(v, np.ndarray):
        return (v[..., None, :] @ _matrix(q))[..., 0, :]
    cross = namespace(v).linalg.cross
    axis = q[..., 1:]
    t = cross(2.0 * v, axis)
    return v + q[..., :1] * t + cross(t, axis)


def quat_to_matrix(q: Array) -> Array:
    """The rotation matrix, row by row, [..., 9]."""
    if isinstance(q, np.ndarray):
        return _matrix(q).reshape(*q.shape[:-1], 9)
    # every entry is a sum of products of two components: two operations in place of forty
    return (q[..., :, None] * q[..., None, :]).flatten(-2) @ like(_PRODUCTS, q)


def quat_to_rotvec(q: Array) -> Array:
    """The rotation vector of least length (at most pi), [..., 3]."""
    xp = namespace(q)
    q = xp.where(q[..., :1] < 0, -q, q)
    w, v = q[..., :1], q[..., 1:]
    sine = xp.sqrt((v * v).sum(-1))[..., None]
    # below 1e-6 the series 2 (1 + sine^2 / 6) is exact in float32
    factor = xp.where(sine > 1e-6, 2.0 * xp.arctan2(sine, w) / clamp(sine, 1e-12, math.inf), 2.0 + sine * sine / 3.0)
    return v * factor


def rotvec_to_quat(r: Array) -> Array:
    """The unit quaternion of a rotation vector, [..., 4]."""
    xp = namespace(r)
    angle = xp.sqrt((r * r).sum(-1))[..., None]
    factor = xp.where(angle > 1e-4, xp.sin(0.5 * angle) / clamp(angle, 1e-12, math.inf), 0.5 - angle * angle / 48.0)
    return normalise(xp.concatenate([xp.cos(0.5 * angle), factor * r], -1))


def normalise(q: Array) -> Array:
    """Q brought back to unit length, [..., 4]."""
    return q / namespace(q).sqrt((q * q).sum(-1))[..., None]
