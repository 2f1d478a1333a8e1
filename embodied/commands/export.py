"""`embodied export`: a trained policy as one ONNX file that says what it needs and proves itself."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.algos import checkpoint
from embodied.algos.trainer import single_threaded
from embodied.commands.build import make_fresh_env, make_policy, make_task
from embodied.compose import Invocation
from embodied.deploy.artifact import kept, needed_readings
from embodied.deploy.export import Case, Exported, Origin, write_policy
from embodied.runs import folder_of
from embodied.sim.fresh import FreshStarts
from embodied.spec.errors import BadInput
from embodied.spec.protocols import Policy

CASES = 4
WORLDS, STEPS = 10, 50  # whose observations, and as many with noise, are compared
SEED = 1_000  # of the worlds and the noise: the same checkpoint always gives the same file


def run(invocation: Invocation) -> int:
    """Export a checkpoint; the last line printed is the result as JSON."""
    assert invocation.checkpoint is not None
    checkpoint.deterministic()
    exported = export(invocation.config, invocation.checkpoint, invocation.out_file)
    print(
        f"{exported.policy}: {exported.policy.stat().st_size / 1000:.0f} kB; onnxruntime and torch differ by at most "
        f"{exported.max_difference:.1e} on {exported.observations} observations"
    )
    print(json.dumps({**asdict(exported), "policy": str(exported.policy)}), flush=True)
    return 0


def export(
    config: Mapping[str, Any], checkpoint_path: Path, out: Path | None = None, say: Callable[[str], None] = print
) -> Exported:
    """Write the policy of a checkpoint, with golden cases from a few worlds of its task on the CPU.

    Args:
        config: the run's resolved configuration.
        checkpoint_path: one of the run's checkpoints.
        out: a new file; None: `policy.onnx` in the run's folder, where it replaces an older one.
        say: takes warnings.

    Raises:
        BadInput: `out` exists, is not named like an ONNX file or cannot be made; the checkpoint is not one.
        Fault: the exported policy does not compute what the trained one does.
    """
    if out is not None:
        _check_new(out)
    content = checkpoint.load(checkpoint_path)
    # few worlds need no GPU, and give the same cases wherever the policy was trained
    config = {**config, "device": "cpu", "sim": {**config["sim"], "engine": "cpu", "threads": 1}}
    if config["policy"]["name"] != "mlp":
        raise BadInput(f"policy={config['policy']['name']} cannot be exported yet: only policy=mlp can")
    task = make_task(config)
    policy: Any = make_policy(config, task.obs_sizes, task.spec.action.size)
    policy.load_state_dict(content["trainer"]["learner"]["policy"])
    env = make_fresh_env(config, task, WORLDS, say)
    trained_on = content["trainer"]["env"]["signature"]
    if env.engine.signature != trained_on:
        say(f"warning: golden cases are from the worlds of {env.engine.signature}, the policy was trained in {trained_on}")
    origin = Origin(
        trained_on,
        checkpoint.weights_hash(policy.state_dict()),
        content["trainer"]["iteration"],
        content["trainer"]["env_steps"],
    )
    with single_threaded(WORLDS), torch.no_grad():
        seen, cases = _roll_out(env, policy, task)
        observations = torch.cat([seen, _around(seen)])
        return write_policy(policy, task.spec, origin, cases, observations, out or folder_of(checkpoint_path) / "policy.onnx")


def _check_new(out: Path) -> None:
    """Refuse a file that exists, that nobody would take for a policy, or that cannot be made (by trying)."""
    if out.suffix != ".onnx":
        raise BadInput(f"out={out}: expected a file name that ends in .onnx, e.g. out={out / 'policy.onnx'}")
    try:
        if out.exists():
            raise BadInput(f"out={out} exists: choose another, or leave out= away to replace policy.onnx in the run's folder")
        with tempfile.TemporaryDirectory(dir=next(path for path in out.absolute().parents if path.exists())):
            pass
    except OSError as error:
        raise BadInput(f"out={out} cannot be made ({error.strerror}): choose another with out=") from error


def _roll_out(env: FreshStarts, policy: Policy, task: Any) -> tuple[Tensor, list[Case]]:
    """What the policy sees in its own episodes [WORLDS * STEPS, D], and moments of them, spread over worlds and time."""
    moments = {i * (STEPS - 1) // (CASES - 1): i for i in range(CASES)}
    obs, seen, cases = env.reset(SEED), [], []
    for step in range(STEPS):
        if step in moments:
            cases.append(_case(env, task, moments[step]))
        seen.append(obs["policy"])
        obs = env.step(policy.act(obs, deterministic=True).action[:, 0])[0]
    return torch.cat(seen), cases


def _case(env: FreshStarts, task: Any, world: int) -> Case:
    state = env.state_dict()
    adr = [int(task.model.joint(name).qposadr[0]) for name in task.spec.robot.joint_names]
    # a task gives its policy only the readings that its terms ask for
    readings = {"joint_pos": env.engine.read("qpos")[:, adr], **state["seen"]}
    row = slice(world, world + 1)
    return Case(
        {name: readings[name][row] for name in needed_readings(task.spec)},
        {name: state["state"][name][row] for name in kept(task.spec)},
    )


def _around(seen: Tensor) -> Tensor:
    """The observations, each moved by noise of 1/100 to 100 times their spread: far beyond what the normaliser clips."""
    generator = torch.Generator().manual_seed(SEED)
    size = 10 ** (4 * torch.rand(len(seen), 1, generator=generator) - 2)
    return seen + size * seen.std(0).clamp(min=0.01) * torch.randn(seen.shape, generator=generator)
