"""Checkpoints: complete, atomic, tensors and plain data only."""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.spec.errors import BadInput

FORMAT = "embodied-checkpoint-1"


def runtime() -> dict[str, str | int]:
    """What must be equal for a run to continue bit-exactly, beside the code."""
    return {
        "torch": str(torch.__version__),  # a class of its own, which a safe load refuses
        "numpy": str(np.__version__),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def deterministic() -> None:
    """Ask torch for bit-equal results from equal inputs; the number of threads stays as it is."""
    torch.use_deterministic_algorithms(True)
    # torch would then fill every new tensor with NaN, to show who reads what was never written: as dear as writing it twice
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # made at run time


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write so that a kill at any moment leaves either the old checkpoint or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        torch.save({"format": FORMAT, "runtime": runtime(), **content}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint; no code in it can run.

    Raises:
        BadInput: it cannot be read, or is not one of ours.
    """
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(f"checkpoint {path} cannot be read ({first[:120]}): give a run folder or its checkpoints/*.pt") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BadInput(f"{path} is not a checkpoint of embodied: give a run folder or its checkpoints/*.pt")
    return content


def differences(content: Mapping[str, Any]) -> list[str]:
    """What differs here from where the checkpoint was written, so that continuing cannot be bit-exact."""
    here, there = runtime(), content["runtime"]
    return [f"{name} {there.get(name)} -> {value}" for name, value in here.items() if there.get(name) != value]


def weights_hash(state: Mapping[str, Any]) -> str:
    """sha256 of named tensors, by name."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        if isinstance(value, Tensor):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
