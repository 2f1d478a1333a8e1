"""`embodied doctor`: what this machine has, what it lacks, how to mend it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

GIB = 2**30

RENDER = """
import mujoco
model = mujoco.MjModel.from_xml_string('<mujoco><worldbody><light pos="0 0 2"/><geom size=".1"/></worldbody></mujoco>')
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 32, 32) as renderer:
    renderer.update_scene(data)
    assert renderer.render().any(), "the picture is black"
"""


@dataclass(frozen=True)
class Check:
    """One finding: `bad` stops training on this machine, `warn` stops something smaller."""

    state: Literal["ok", "warn", "bad"]
    what: str
    mend: str = ""


def doctor() -> int:
    """Print every finding, with its mend where there is one; 1 if a hard requirement fails, otherwise 0."""
    worst = 0
    for check in (_python, _torch, _mujoco, _warp, _rendering, _video, _memory, _disk):
        for found in check():
            worst = max(worst, found.state == "bad")
            print(f"{found.state:<5} {found.what}", flush=True)
            if found.mend:
                print(f"      mend: {found.mend}", flush=True)
    return int(worst)


def _python() -> Iterator[Check]:
    system = platform.system()
    text = f"Python {platform.python_version()} on {system} {platform.machine()}, {os.cpu_count()} cores"
    if system not in ("Linux", "Darwin"):
        yield Check("warn", text, "this system is untested; Linux and macOS are supported")
    else:
        yield Check("ok", text)


def _torch() -> Iterator[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        yield Check("bad", f"torch cannot be imported: {error}", "pip install --force-reinstall torch")
        return
    yield Check("ok", f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        yield Check("ok", f"CUDA {torch.version.cuda}: {names}")
    elif torch.version.cuda is None:
        mend = "pip install torch built for CUDA (https://pytorch.org)" if shutil.which("nvidia-smi") else ""
        yield Check("warn" if mend else "ok", "CUDA: this torch is built without it, training runs on the CPU", mend)
    else:
        yield Check("warn", "CUDA: no device found, training runs on the CPU", "check the driver with nvidia-smi")


def _mujoco() -> Iterator[Check]:
    mend = "pip install 'mujoco==3.17.*'"
    try:
        import mujoco
    except (ImportError, OSError) as error:
        yield Check("bad", f"mujoco cannot be imported: {error}", mend)
        return
    right = mujoco.__version__.startswith("3.17.")
    yield Check("ok", f"MuJoCo {mujoco.__version__}") if right else Check("bad", f"MuJoCo {mujoco.__version__}", mend)


def _warp() -> Iterator[Check]:
    if importlib.util.find_spec("mujoco_warp") is None:
        yield Check("ok", "MuJoCo Warp: not installed; only GPUs need it (pip install 'embodied[gpu]')")
    else:
        yield Check("ok", f"MuJoCo Warp {importlib.metadata.version('mujoco-warp')}")


BACKENDS = ("cgl",) if sys.platform == "darwin" else ("egl", "osmesa")


def offscreen_backend() -> str | None:
    """The first GL backend that really renders here, None if none does. Takes a second: it tries."""
    return next((name for name in BACKENDS if _render_error(name) is None), None)


def _rendering() -> Iterator[Check]:
    backends = BACKENDS
    errors = {name: _render_error(name) for name in backends}
    usable = [name for name in backends if errors[name] is None]
    if usable:
        yield Check("ok", f"offscreen rendering: {', '.join(usable)} (MUJOCO_GL={usable[0]} selects it)")
        return
    reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
    mend = "apt-get install libegl1 libgl1-mesa-dri libosmesa6" if sys.platform == "linux" else "run in a desktop session"
    yield Check("warn", f"offscreen rendering: none works, so no videos and no camera observations ({reasons})", mend)


def _render_error(backend: str) -> str | None:
    """Why `backend` renders nothing; a process of its own, because a broken driver aborts it."""
    environment = os.environ | {"MUJOCO_GL": backend, "PYOPENGL_PLATFORM": "" if backend == "cgl" else backend}
    try:
        done = subprocess.run([sys.executable, "-c", RENDER], env=environment, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "no answer in 60 s"
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    wrong = [line for line in lines if "Error" in line]  # the last of stderr is often a destructor's complaint
    return (wrong or lines or [f"ended with {done.returncode}"])[0].strip()


def _video() -> Iterator[Check]:
    mend = "pip install --force-reinstall av"
    try:
        import av
    except (ImportError, OSError) as error:
        yield Check("warn", f"video: av cannot be imported: {error}", mend)
        return
    try:
        with av.open(io.BytesIO(), "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=25)
            stream.width = stream.height = 64
            stream.pix_fmt = "yuv420p"
            container.mux(stream.encode(av.VideoFrame(64, 64, "yuv420p")))
            container.mux(stream.encode())
    except (av.FFmpegError, ValueError) as error:
        yield Check("warn", f"video: H.264 cannot be encoded by av {av.__version__}: {error}", mend)
        return
    yield Check("ok", f"video: av {av.__version__} encodes H.264")


def _memory() -> Iterator[Check]:
    import psutil

    memory = psutil.virtual_memory()
    text = f"memory: {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    yield Check("warn", text, "lower sim.num_worlds") if memory.available < 2 * GIB else Check("ok", text)


def _disk() -> Iterator[Check]:
    free = shutil.disk_usage(".").free
    text = f"disk: {free / GIB:.1f} GiB free here"
    yield Check("warn", text, "free some, or write elsewhere with out=") if free < GIB else Check("ok", text)
