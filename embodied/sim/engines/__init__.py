"""Physics of N copies of one model: what both engines share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import mujoco
import numpy as np

HEALTH_BITS = {"bad_write": 1, "engine_warning": 2, "engine_error": 4, "not_finite": 8, "overflow": 16}
"""bad_write: refused non-finite values; engine_warning: MuJoCo's counters (bad position, velocity, acceleration, control);
engine_error: MuJoCo raised; not_finite: state holds NaN or infinity; overflow: contacts or constraints were dropped."""


def describe_health(bits: int) -> str:
    """The names of the bits set, joined by ' + '."""
    return " + ".join(name for name, bit in HEALTH_BITS.items() if bits & bit) or "healthy"


def model_signature(engine: str, version: str, model: mujoco.MjModel, parameters: Sequence[str]) -> str:
    """Engine, its version, and a hash of the compiled model and of what may differ between worlds: equal signatures mean
    interchangeable state rows.
    """
    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    content = hashlib.sha256(buffer.tobytes())
    content.update(",".join(parameters).encode())
    return f"{engine}-{version}-{content.hexdigest()[:16]}"
