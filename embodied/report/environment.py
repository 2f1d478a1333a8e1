"""What a run ran on and with, for environment.json."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "embodied",
    "torch",
    "mujoco",
    "mujoco-warp",
    "warp-lang",
    "numpy",
    "scipy",
    "gymnasium",
    "hydra-core",
    "omegaconf",
    "rerun-sdk",
    "av",
)


def describe() -> dict[str, Any]:
    """Host, versions, source tree and command line of this process, as plain data for JSON.

    Holds no host name, user name or absolute home path, so that it can be shared; the patch of a modified checkout is
    verbatim.
    """
    return {
        "start_time": _start_time(),
        "command": _command(),
        "host": _host(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "torch": _torch(),
        "source": _source(Path(__file__).resolve().parents[2]),
    }


def _start_time() -> str:
    import psutil

    started = datetime.datetime.fromtimestamp(psutil.Process().create_time(), tz=datetime.UTC)
    return started.isoformat(timespec="seconds")


def _command() -> list[str]:
    return [Path(sys.argv[0]).name, *map(_without_person, sys.argv[1:])]


def _without_person(text: str) -> str:
    """`text` with the home directory as ~ and path components that equal its owner's name as <user>."""
    try:
        home = Path.home()
    except RuntimeError:  # some containers know none
        return text
    if not home.name:  # the root of the file system
        return text
    text = re.sub(rf"{re.escape(str(home))}(?=/|$)", "~", text)
    return re.sub(rf"(?<=/){re.escape(home.name)}(?=/|$)", "<user>", text)


def _host() -> dict[str, Any]:
    import psutil

    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        # containers and taskset allow fewer than the machine has; macOS cannot tell
        "usable_threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_bytes": psutil.virtual_memory().total,
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str | None:
    """The installed version, None if it is not installed."""
    if package == "embodied":  # may run from a checkout that is not installed
        import embodied

        return embodied.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"threads": torch.get_num_threads(), "interop_threads": torch.get_num_interop_threads(), "gpus": gpus}


def _source(tree: Path) -> dict[str, Any] | None:
    """Commit and uncommitted changes of `tree`; None if it is not the root of a git checkout or git is missing."""
    root = _git(tree, "rev-parse", "--show-toplevel")
    # an installed copy may lie inside somebody's own repository, which is none of our business
    if root is None or Path(root.strip()).resolve() != tree:
        return None
    commit = _git(tree, "rev-parse", "HEAD")
    patch = _git(tree, "diff", "HEAD", "--no-ext-diff", "--no-color") or ""
    untracked = _git(tree, "ls-files", "--others", "--exclude-standard") or ""
    return {
        "commit": commit.strip() if commit else None,
        "modified": bool(patch),
        "patch_sha256": hashlib.sha256(patch.encode(errors="surrogateescape")).hexdigest() if patch else None,
        "patch": patch or None,
        "untracked": untracked.splitlines(),
    }


def _git(tree: Path, *arguments: str) -> str | None:
    """What git prints, None if it cannot."""
    try:
        done = subprocess.run(
            ["git", "-C", str(tree), *arguments], capture_output=True, encoding="utf-8", errors="surrogateescape"
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
