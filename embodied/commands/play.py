"""`embodied play`: watch a trained policy: a rerun recording and, where a GL backend works, a video."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import torch

from embodied.algos import checkpoint
from embodied.algos.chunks import ChunkQueue
from embodied.commands.build import make_fresh_env, make_task
from embodied.commands.evaluate import load_policy
from embodied.compose import Invocation
from embodied.report.recording import Geom, RerunRecording, write_video
from embodied.sim.fresh import FreshStarts

WIDTH, HEIGHT = 640, 480
GEOM_NAMES = {
    mujoco.mjtGeom.mjGEOM_PLANE: "plane",
    mujoco.mjtGeom.mjGEOM_SPHERE: "sphere",
    mujoco.mjtGeom.mjGEOM_CAPSULE: "capsule",
    mujoco.mjtGeom.mjGEOM_ELLIPSOID: "ellipsoid",
    mujoco.mjtGeom.mjGEOM_CYLINDER: "cylinder",
    mujoco.mjtGeom.mjGEOM_BOX: "box",
    mujoco.mjtGeom.mjGEOM_HFIELD: "height_field",
}


def run(invocation: Invocation) -> int:
    """Play episodes one after another and record them."""
    config = invocation.config
    checkpoint.deterministic()
    task = make_task(config)
    policy = load_policy(invocation, task)
    env = make_fresh_env(config, task, 1, print)
    folder = invocation.run_dir / "videos"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"play-{config['seed']}.rrd"
    frames: list[np.ndarray] = []
    episodes = min(config["episodes"], EPISODES) if "episodes" not in _given(invocation) else config["episodes"]
    draw = _can_render(env)
    with RerunRecording(path) as recording:
        recording.log_scene(*_scene(task.model))
        successes = _play(env, policy, config["seed"], episodes, recording, frames if draw else None)
    print(f"{successes} of {episodes} episodes succeeded")
    print(f"recording: {path} (open with: rerun {path})")
    if frames:
        video = path.with_suffix(".mp4")
        write_video(frames, video, 1.0 / task.spec.robot.control_dt)
        print(f"video: {video}")
    return 0


EPISODES = 3  # when no number is asked for


def _given(invocation: Invocation) -> set[str]:
    return {word.partition("=")[0] for word in invocation.overrides}


def _can_render(env: FreshStarts) -> bool:
    try:
        env.engine.render("side", [0], 64, 48)
    except Exception as error:  # every GL backend fails in its own way; the recording does not need one
        print(f"no video: rendering failed ({type(error).__name__}: {error}); `embodied doctor` says how to mend it")
        return False
    return True


def _scene(model: mujoco.MjModel) -> tuple[list[str], list[Geom]]:
    names, geoms = [], []
    for i in range(model.ngeom):
        kind = mujoco.mjtGeom(model.geom_type[i])
        names.append(model.geom(i).name or f"geom_{i}")
        size, heights = model.geom_size[i].copy(), None
        if kind == mujoco.mjtGeom.mjGEOM_HFIELD:
            field = model.geom_dataid[i]
            first, shape = model.hfield_adr[field], (model.hfield_nrow[field], model.hfield_ncol[field])
            size = model.hfield_size[field].copy()
            heights = size[2] * model.hfield_data[first : first + shape[0] * shape[1]].reshape(shape)
        geoms.append(Geom(GEOM_NAMES[kind], size, model.geom_rgba[i].copy(), heights))
    return names, geoms


@torch.no_grad()
def _play(
    env: FreshStarts, policy: Any, seed: int, episodes: int, recording: RerunRecording, frames: list[np.ndarray] | None
) -> int:
    dt, now, successes = env.task.spec.robot.control_dt, 0.0, 0
    for episode in range(episodes):
        obs, queue = env.reset(seed + episode), ChunkQueue(policy, 1, env.action_size, env.device)
        for _ in range(env.max_episode_steps):
            pos, mat = env.engine.read("geom_xpos")[0], env.engine.read("geom_xmat")[0]
            if frames is not None:
                frames.append(env.engine.render("side", [0], WIDTH, HEIGHT)[0].numpy())
            obs, _, terminated, truncated, info = env.step(queue.next(obs, deterministic=True).action)
            figures = {name: float(x[0]) for name, x in info["errors"].items()}
            recording.log_step(now, pos.numpy(), _quats(mat.numpy()), {**figures, "success": float(info["success"][0])})
            now += dt
            successes += int(info["success"][0])
            if bool(terminated[0] | truncated[0] | info["invalid"][0]):
                break
    return successes


def _quats(mat: np.ndarray) -> np.ndarray:
    """Rotation matrices [G, 9] to quaternions wxyz [G, 4]."""
    out = np.empty((len(mat), 4))
    for i, row in enumerate(mat.astype(np.float64)):
        mujoco.mju_mat2Quat(out[i], row)
    return out
