"""Collecting episodes, imitating them, and training on from what came of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from embodied import cli
from embodied.algos import checkpoint
from embodied.algos.sft import SFT, SFTOptions
from embodied.algos.windows import Windows
from embodied.commands.build import make_fresh_env, make_task
from embodied.commands.train import eval_seed
from embodied.data.episodes import Episode, Feature
from embodied.data.lerobot import DatasetWriter, read
from embodied.policies.flow import FlowOptions, FlowPolicy
from embodied.policies.gaussian import GaussianPolicy, MLPOptions
from embodied.spec.errors import BadInput

CPU = torch.device("cpu")
FEATURES = {
    "observation.state": Feature("float32", (3,), ["a", "b", "c"]),
    "action": Feature("float32", (2,), ["x", "y"]),
    "next.success": Feature("bool", (1,), None),
}
GAIN = np.array([[0.5, -0.2], [0.1, 0.3], [-0.4, 0.2]], np.float32)
SMALL = ["sim.num_worlds=16", "sim.threads=1", "task.bank.size=64", "eval.episodes=8", "episodes=8"]


def write(folder: Path, lengths: list[int], successes: list[bool], seed: int = 0) -> Path:
    """Episodes of a linear expert: action = state @ GAIN."""
    rng = np.random.default_rng(seed)
    with DatasetWriter(folder, 25, "arm", FEATURES, {}) as writer:
        for length, success in zip(lengths, successes, strict=True):
            state = rng.uniform(-1, 1, (length, 3)).astype(np.float32)
            done = np.zeros(length, bool)
            done[-1] = success
            writer.add(Episode({"observation.state": state, "action": state @ GAIN, "next.success": done}, "toy"))
    return folder


# -- moments of episodes -------------------------------------------------------------------------------------------------


def test_a_window_is_what_was_done_from_then_on_and_ends_with_its_episode(tmp_path) -> None:
    data = read(write(tmp_path / "data", [5, 2, 4], [True, False, True]))
    windows = Windows.of(data, 3, True, CPU, "algo.data")
    assert windows.left.tolist() == [5, 4, 3, 2, 1, 4, 3, 2, 1]  # the failed one is left out
    kept = np.concatenate([data.columns["action"][:5], data.columns["action"][7:]])
    obs, action, mask = windows.draw(500, torch.Generator().manual_seed(0))
    for state, done, good in zip(obs["policy"], action, mask, strict=True):
        frame = int((windows.state == state).all(1).nonzero())
        end = 5 if frame < 5 else 9
        assert good.tolist() == [frame + i < end for i in range(3)]
        for i in range(min(3, end - frame)):
            np.testing.assert_array_equal(done[i], kept[frame + i])
    counts = torch.stack([(obs["policy"] == row).all(1).sum() for row in windows.state])
    assert float(counts.min()) > 25  # 500 / 9 each
    assert len(Windows.of(data, 3, False, CPU, "algo.data").left) == 11


def test_data_that_cannot_be_learned_from_is_refused(tmp_path) -> None:
    failed = read(write(tmp_path / "failed", [3, 3], [False, False]))
    with pytest.raises(BadInput, match=r"none of 2 episodes succeeded; algo\.only_success=false uses all"):
        Windows.of(failed, 2, True, CPU, "algo.data")
    windows = Windows.of(failed, 2, False, CPU, "algo.data")
    with pytest.raises(BadInput, match="observations of 3 numbers and actions of 2, the task's policy sees 4"):
        windows.check(4, 2)
    with pytest.raises(BadInput, match=r"algo\.data= is missing: expected a dataset, e.g. of embodied collect"):
        SFT.validate(SFTOptions(), 1)
    with pytest.raises(BadInput, match=r"algo\.data=nowhere is no folder"):
        SFT.validate(SFTOptions(data="nowhere"), 1)


# -- imitation -----------------------------------------------------------------------------------------------------------


def learner(kind: str, folder: Path, seed: int = 0) -> SFT:
    torch.manual_seed(seed)
    sizes = {"policy": 3, "critic": 3}
    policy = (
        GaussianPolicy(MLPOptions(hidden=[32]), sizes, 2)
        if kind == "mlp"
        else FlowPolicy(FlowOptions(hidden=[64, 64], horizon=1, execute=1), sizes, 2)
    )
    return SFT(SFTOptions(data=str(folder), updates=400, learning_rate=3e-3), policy, sizes, 2, 1, "cpu", seed)


@pytest.mark.parametrize("kind", ["mlp", "flow"])
def test_a_linear_expert_is_imitated(kind: str, tmp_path) -> None:
    sft = learner(kind, write(tmp_path / "data", [100] * 10, [True] * 10))
    losses = [float(sft.update()["imitation"]) for _ in range(3)]
    assert losses[-1] < losses[0]
    state = 2 * torch.rand(400, 3, generator=torch.Generator().manual_seed(5)) - 1
    done = sft.policy.act({"policy": state}, deterministic=True).action[:, 0]
    expert = state @ torch.from_numpy(GAIN)
    # a flow's four Euler steps leave some of the noise
    assert float((done - expert).square().mean() / expert.var()) < (0.02 if kind == "mlp" else 0.1)


@pytest.mark.parametrize("kind", ["mlp", "flow"])
def test_it_continues_bit_for_bit_on_the_same_data_alone(kind: str, tmp_path) -> None:
    folder = write(tmp_path / "data", [20] * 4, [True] * 4)
    one = learner(kind, folder)
    one.update()
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other = learner(kind, folder, seed=1)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert float(one.update()["imitation"]) == float(other.update()["imitation"])
    assert all(torch.equal(a, b) for a, b in zip(one.policy.parameters(), other.policy.parameters(), strict=True))
    changed = learner(kind, write(tmp_path / "changed", [20] * 4, [True] * 4, seed=1))
    with pytest.raises(BadInput, match="has changed since"):
        changed.load_state_dict(one.state_dict())


# -- from the command line -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of one iteration: nothing learned, but a policy."""
    out = tmp_path_factory.mktemp("runs") / "first"
    words = ["train", "task=assembly", *SMALL, "budget.iterations=1", f"out={out}", "task.episode_s=0.8"]
    assert cli.main(words) == 0
    return out


def test_what_is_collected_is_what_was_seen_and_done(run, tmp_path, capsys) -> None:
    """Its actions, taken again from the same starts, show its observations again."""
    folder = tmp_path / "data"
    assert cli.main(["collect", f"checkpoint={run}", "episodes=5", f"out={folder}", "seed=4"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    data = read(folder)
    assert said == {"out": str(folder), "episodes": 5, "successes": 0, "frames": 100}  # 0.8 s at 25 Hz, none succeeds
    assert data.fps == 25 and data.robot_type == "franka" and len(data) == 5
    config = yaml.safe_load((run / "config.yaml").read_text())
    task = make_task(config)
    assert data.extra["spec"] == json.loads(json.dumps(task.spec.to_dict()))
    content = checkpoint.load(run / "checkpoints" / "latest.pt")
    assert data.extra["weights_sha256"] == checkpoint.weights_hash(content["trainer"]["learner"]["policy"])
    env = make_fresh_env(config, task, 5, print)
    obs, episodes = env.reset(eval_seed(4, 3)), data.episodes
    for t in range(20):
        for world, episode in enumerate(episodes):
            np.testing.assert_array_equal(obs["policy"][world], episode.features["observation.state"][t])
        action = torch.from_numpy(np.stack([episode.features["action"][t] for episode in episodes]))
        obs, reward, terminated, truncated, _ = env.step(action)
        np.testing.assert_allclose(reward, [episode.features["next.reward"][t] for episode in episodes], rtol=1e-5)
        over = (terminated | truncated).tolist()
        assert over == [bool(episode.features["next.done"][t]) for episode in episodes] == [t == 19] * 5
    names = data.features["observation.state"].names
    assert len(names) == task.spec.obs_size and len(set(names)) == len(names)


def test_collecting_needs_a_new_folder(run, tmp_path, capsys) -> None:
    assert cli.main(["collect", f"checkpoint={run}"]) == 2
    assert "out= is missing: a new folder for the dataset" in capsys.readouterr().err
    assert cli.main(["collect", f"checkpoint={run}", f"out={tmp_path}"]) == 2
    assert f"{tmp_path} exists" in capsys.readouterr().err


def test_sft_then_rl_on_the_command_line(run, tmp_path, capsys) -> None:
    data, first, second = (tmp_path / name for name in ("data", "sft", "rl"))
    assert cli.main(["collect", f"checkpoint={run}", "episodes=4", f"out={data}"]) == 0
    train = ["train", "task=assembly", *SMALL, "task.episode_s=0.8"]
    flow = ["policy=flow", "policy.hidden=[16,16]", "policy.horizon=4", "policy.execute=2"]
    sft = ["algo=sft", f"algo.data={data}", "algo.only_success=false", "algo.updates=5", "budget.iterations=2"]
    assert cli.main([*train, *flow, *sft, f"out={first}"]) == 0
    rows = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    assert [row["env_steps"] for row in rows] == [0, 0] and rows[0]["loss/imitation"] > 0
    assert rows[0]["success_rate"] is None
    # the policy is as it was there, but for what is said
    words = [f"start={first}", "policy.noise=0.3", "algo.critic_warmup=5", "budget.iterations=2", f"out={second}"]
    assert cli.main([*train, *words]) == 0
    config = yaml.safe_load((second / "config.yaml").read_text())
    assert config["policy"]["name"] == "flow" and config["policy"]["horizon"] == 4 and config["policy"]["noise"] == 0.3
    before, after = (
        checkpoint.load(folder / "checkpoints" / "latest.pt")["trainer"]["learner"]["policy"] for folder in (first, second)
    )
    # nothing but the critic has learned yet, and the statistics of the data are kept
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    capsys.readouterr()
    assert cli.main(["eval", f"checkpoint={second}", "eval.sampled=true"]) == 0
    assert 0 <= json.loads(capsys.readouterr().out.splitlines()[-1])["success_sampled"] <= 1
    assert cli.main([*train, f"start={first}", "policy.horizon=6", f"out={tmp_path / 'third'}"]) == 2
    assert "its policy is built otherwise" in capsys.readouterr().err
    assert cli.main(["eval", f"checkpoint={second}", f"start={first}"]) == 2
    assert "start=" in capsys.readouterr().err
