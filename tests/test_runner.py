"""A policy drives a simulated robot that is another process: what is observed, decided, sent, recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from live import exported_policy, robot
from worlds import make_fresh

from embodied.algos import checkpoint
from embodied.commands.build import make_policy, make_task
from embodied.deploy import guard
from embodied.deploy.artifact import PolicyArtifact
from embodied.deploy.journal import episodes, read
from embodied.spec.observe import command, observe, start_memory


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    file, config = exported_policy(tmp_path_factory.mktemp("policy"))
    torch.use_deterministic_algorithms(False)
    return file, config


def deploy_run(policy: Path, address: str, out: Path, *words: str, cwd: Path | None = None) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "embodied.cli",
        "deploy",
        "run",
        f"policy={policy}",
        f"robot={address}",
        f"out={out}",
        *words,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finished(process: subprocess.Popen) -> tuple[int, dict, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, json.loads(out.strip().splitlines()[-1]) if "{" in out else {}, err


def torch_policy(config):
    task = make_task(config)
    policy = make_policy(config, task.obs_sizes, task.spec.action.size)
    content = checkpoint.load(Path(config["out"]) / "checkpoints" / "latest.pt")
    policy.load_state_dict(content["trainer"]["learner"]["policy"])
    return policy


# -- the bridge computes what the simulator computes -----------------------------------------------------------------------


def test_logged_simulator_readings_give_the_simulators_actions(policy):
    """Readings of episodes in worlds, through the robot's side (numpy, onnxruntime): the same actions and targets."""
    file, config = policy
    artifact, brain = PolicyArtifact.load(file), torch_policy(config)
    env = make_fresh(4)
    obs = env.reset(3)
    memory = None
    differing = 0.0
    with torch.no_grad():
        for _ in range(40):
            readings = {name: x.numpy() for name, x in env._seen.items()}
            memory = start_memory(artifact.spec, readings) if memory is None else memory
            seen = observe(artifact.spec, readings, memory).astype(np.float32)
            np.testing.assert_allclose(seen, obs["policy"].numpy(), atol=1e-4)
            action = brain.act(obs, deterministic=True).action[:, 0]
            ours = artifact.act(seen)
            differing = max(differing, float(np.abs(ours - action.numpy()).max()))
            memory = command(artifact.spec, ours, readings, memory)
            obs, _, terminated, truncated, _ = env.step(action)
            if bool((terminated | truncated).any()):
                break  # that world shows its next episode
            np.testing.assert_allclose(memory["target_pos"], env._state["target_pos"].numpy(), atol=1e-6)
    assert differing <= 1e-5
    assert float(action.abs().max()) > 0.1, "a policy that does something"


@pytest.fixture(scope="module")
def driven(policy, tmp_path_factory):
    """Two episodes on a robot that counts its joints from the other end, in lockstep; the runner's journal, the robot's log."""
    folder = tmp_path_factory.mktemp("driven")
    words = ("lockstep=true", "reality.reversed_joints=true", "reality.force_noise=0", "reality.position_noise=0")
    with robot(folder, *words, f"log={folder / 'robot.emb'}") as process:
        code, summary, err = finished(deploy_run(policy[0], process.address, folder / "out", "episodes=2", "seed=5"))
    assert code == 0, err
    return folder, summary


def test_the_journal_replays_to_the_same_actions_in_torch(policy, driven):
    """From the recorded readings alone, by torch, as the trainer would compute."""
    file, config = policy
    spec, brain = PolicyArtifact.load(file).spec, torch_policy(config)
    for episode in episodes(driven[0] / "out" / "journal.emb"):
        ticks = [tick.data for tick in episode.ticks]
        assert len(ticks) == episode.end.data["steps"] > 5
        memory = None
        for tick in ticks:
            readings = {name: torch.from_numpy(x)[None] for name, x in tick["readings"].items()}
            memory = start_memory(spec, readings) if memory is None else memory
            obs = observe(spec, readings, memory)
            np.testing.assert_allclose(tick["obs"], obs[0].numpy(), atol=1e-4)
            with torch.no_grad():
                action = brain.act({"policy": obs}, deterministic=True).action[:, 0]
            np.testing.assert_allclose(tick["action"], action[0].numpy(), atol=1e-5)
            memory = command(spec, action, readings, memory)
            np.testing.assert_allclose(tick["target_pos"], memory["target_pos"][0].numpy(), atol=1e-6)


def test_the_joints_it_recorded_are_those_of_the_training_order(policy, driven):
    """An independent world of the same scene, by the engine: its joints, in the training order, at the first tick."""
    env = make_fresh(1)
    env._rows = env.task.fresh_starts(env.engine, torch.Generator().manual_seed(5))
    env.engine.set_state(env._rows)
    first = episodes(driven[0] / "out" / "journal.emb")[0].ticks[0].data["readings"]
    np.testing.assert_allclose(first["joint_pos"], env.engine.read("qpos")[0].numpy(), atol=2e-3)


def test_what_was_sent_is_what_the_robot_obeyed_and_kept_the_limits(policy, driven):
    limits = guard.Limits.of(PolicyArtifact.load(policy[0]).spec.robot)
    folder, _ = driven
    sent = [r.data for r in read(folder / "out" / "journal.emb") if r.kind == "tick"]
    obeyed = {r.data["sequence"]: r.data for r in read(folder / "robot.emb") if r.kind == "command"}
    assert all(not command["refused"] for command in obeyed.values())
    assert len(obeyed) >= len(sent)
    heard = {tuple(np.float32(command["pos"])) for command in obeyed.values()}
    for tick in sent:
        assert tuple(tick["sent_pos"]) in heard
    for episode in episodes(folder / "out" / "journal.emb"):
        path = np.array([tick.data["sent_pos"] for tick in episode.ticks], float)
        velocity = np.diff(path, axis=0) / limits.dt
        assert np.abs(velocity).max() <= limits.velocity[0]
        assert np.abs(np.diff(velocity, axis=0)).max() / limits.dt <= limits.acceleration[0] + 1e-3


def test_the_summary_agrees_with_the_journal(driven):
    folder, summary = driven
    assert json.loads((folder / "out" / "summary.json").read_text()) == summary
    recorded = episodes(folder / "out" / "journal.emb")
    assert summary["episodes"] == len(recorded) == 2
    assert summary["successes"] == sum(episode.end.data["success"] for episode in recorded)
    for episode in recorded:
        assert episode.end.data["truncated"] == (episode.end.data["outcome"] != "success")
    meta = next(iter(read(folder / "out" / "journal.emb"))).data
    assert meta["policy"]["spec"]["task"] == "assembly" and meta["robot"]["lockstep"]


def test_lockstep_runs_are_equal(policy, driven, tmp_path):
    """Without a wall clock nothing is left to chance: the same scenes give the same ticks, to the last bit."""
    words = ("lockstep=true", "reality.reversed_joints=true", "reality.force_noise=0", "reality.position_noise=0")
    with robot(tmp_path, *words) as process:
        code, _, err = finished(deploy_run(policy[0], process.address, tmp_path / "out", "episodes=2", "seed=5"))
    assert code == 0, err
    one, two = (episodes(folder / "out" / "journal.emb") for folder in (driven[0], tmp_path))
    for a, b in zip(one, two, strict=True):
        for x, y in zip(a.ticks, b.ticks, strict=True):
            np.testing.assert_array_equal(x.data["sent_pos"], y.data["sent_pos"])
            np.testing.assert_array_equal(x.data["obs"], y.data["obs"])


# -- starting and stopping -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    with robot(folder, f"log={folder / 'robot.emb'}") as process:
        yield process


def wait_for_ticks(journal: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if journal.exists() and sum(r.kind == "tick" for r in read(journal, strict=False)) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {count} ticks in {journal}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_the_episode_at_rest_and_recorded(policy, live, tmp_path, number):
    process = deploy_run(policy[0], live.address, tmp_path / "out", "episodes=50")
    wait_for_ticks(tmp_path / "out" / "journal.emb", 20)
    process.send_signal(number)
    code, summary, err = finished(process)
    assert (code, err.strip()) == (130, "interrupted")
    last = episodes(tmp_path / "out" / "journal.emb")[-1]
    assert (last.end.data["outcome"], last.end.data["truncated"]) == ("stopped", True)
    assert summary["episodes"] >= 1 and summary["fault"] is None
    statuses = [r.data for r in read(live.log, strict=False) if r.kind == "status"]
    assert [s["detail"] for s in statuses][-2:] == ["rest", "released"], "no watchdog: it was brought to rest"


def test_a_second_runner_is_refused_and_nothing_is_written(policy, live, tmp_path):
    process = deploy_run(policy[0], live.address, tmp_path / "first", "episodes=50")
    wait_for_ticks(tmp_path / "first" / "journal.emb", 5)
    code, _, err = finished(deploy_run(policy[0], live.address, tmp_path / "second"))
    assert code == 1 and "held by embodied deploy run" in err and err.count("\n") == 1
    assert not (tmp_path / "second").exists()
    process.send_signal(signal.SIGINT)
    assert finished(process)[0] == 130


def test_the_emergency_stop_ends_the_run(policy, live, tmp_path):
    process = deploy_run(policy[0], live.address, tmp_path / "out", "episodes=50")
    wait_for_ticks(tmp_path / "out" / "journal.emb", 10)
    cli = [sys.executable, "-m", "embodied.cli", "deploy"]
    assert subprocess.run([*cli, "stop", f"robot={live.address}"], capture_output=True, check=False).returncode == 0
    code, summary, err = finished(process)
    assert code == 1 and "emergency stop" in err and "emergency stop" in summary["fault"]
    code, _, err = finished(deploy_run(policy[0], live.address, tmp_path / "again"))
    assert code == 1 and "embodied deploy clear" in err
    assert subprocess.run([*cli, "clear", f"robot={live.address}"], capture_output=True, check=False).returncode == 0
    code, summary, _ = finished(deploy_run(policy[0], live.address, tmp_path / "after"))
    assert code == 0 and summary["episodes"] == 1


def test_a_policy_for_another_robot_is_refused_by_name(policy, live, tmp_path):
    import onnx

    model = onnx.load(policy[0])
    (entry,) = model.metadata_props
    metadata = json.loads(entry.value)
    metadata["spec"]["robot"]["impedance"]["stiffness"][0] = 900.0
    entry.value = json.dumps(metadata)
    onnx.save(model, tmp_path / "other.onnx")
    code, _, err = finished(deploy_run(tmp_path / "other.onnx", live.address, tmp_path / "out"))
    assert code == 2 and "stiffness" in err and "900" in err and "1500" in err
    assert not (tmp_path / "out").exists()


def test_the_control_process_has_no_torch():
    code = (
        "import sys, embodied.commands.deploy.run, embodied.deploy.brain, embodied.deploy.recorder; "
        "print([name for name in ('torch', 'mujoco', 'rerun') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["deploy", "run"], "policy is missing"),
        (["deploy", "run", "polcy=x"], "did you mean 'policy'?"),
        (["deploy", "run", "policy=nothing.onnx"], "nothing.onnx"),
        (["deploy", "run", "policy=x", "episodes=0"], "episodes=0: expected 1 or more"),
        (["deploy", "run", "policy=x", "episodes=many"], "expected a whole number"),
        (["deploy", "sim"], "task is missing"),
        (["deploy", "sim", "task=assembly", "reality.frictoin=2"], "did you mean 'reality.friction'?"),
        (["deploy", "sim", "task=assembly", "reality=shifty"], "did you mean 'shifted'?"),
        (["deploy", "sim", "task=assembly", "reality.gains=0"], "expected a factor above 0"),
        (["deploy", "sim", "task=assembly", "port=99999"], "expected 1 to 65535"),
        (["deploy", "sim", "task=assembly", "host=0.0.0.0"], "shared key"),
        (["deploy", "replay", "journal=none"], "there is no such journal"),
        (["deploy", "stop", "robot=nowhere"], "expected host:port"),
    ],
)
def test_bad_input_is_one_line_before_any_work(words, said, capsys):
    from embodied.cli import main

    assert main(words) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_robot_that_is_not_there_is_a_fault_in_one_line(policy, tmp_path):
    code, _, err = finished(deploy_run(policy[0], "127.0.0.1:9", tmp_path / "out"))
    assert code == 1 and "is it running?" in err and err.count("\n") == 1
