"""Samplers in real training: what they are told, determinism, resume, and steps counted honestly."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from test_train import SMALL, assert_equal, cache, torch_as_found, train, weights  # noqa: F401  # fixtures, used by their names
from worlds import make_engine, make_env, make_task, make_trainer, small_bank

from embodied.cli import main
from embodied.commands.build import make_trials
from embodied.policies.gaussian import GaussianPolicy, MLPOptions
from embodied.report.metrics import read_metrics, without_times
from embodied.sim.env import WorldsEnv
from embodied.sim.samplers.plr import PLR, PLROptions
from embodied.sim.samplers.uniform import Uniform, UniformOptions
from embodied.sim.tasks.assembly_starts import goal_distance

CHOICES = {
    "plr": ["sampler=plr"],
    "sfl": ["sampler=sfl", "sampler.num_levels=12", "sampler.episodes=2", "sampler.buffer_size=4", "sampler.update_period=2"],
    "linear": ["sampler=linear", "sampler.max_init_level=2"],
    "answers": ["sampler.max_age=20", "sampler.uniform_fraction=0.1", "sampler.quarantine=5"],
}


@pytest.mark.parametrize("choice", CHOICES)
def test_seven_iterations_equal_three_save_load_and_four(choice: str, tmp_path: Path) -> None:
    words = [word for word in SMALL if "save.every" not in word] + ["save.every=3", *CHOICES[choice]]
    arguments = [*words, "task.episode_s=0.5"]
    whole = tmp_path / "whole"
    assert main(["train", *arguments, f"out={whole}", "budget.iterations=7"]) == 0
    assert main(["train", *arguments, f"out={tmp_path / 'parts'}", "budget.iterations=3"]) == 0
    assert main(["train", f"resume={tmp_path / 'parts'}", "budget.iterations=7"]) == 0
    rows = [[without_times(row) for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("whole", "parts")]
    assert rows[0] == rows[1] and len(rows[0]) == 7
    assert_equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    sampler = torch.load(whole / "checkpoints" / "latest.pt", weights_only=True)["trainer"]["env"]["sampler"]
    assert sampler["visits"].sum() > 0
    if choice == "plr":
        assert sampler["met"].sum() > 5 and (sampler["scores"][sampler["met"]] > 0).all()


def test_steps_of_trials_are_counted(tmp_path: Path) -> None:
    """Ahead of iterations 2, 4, ...: 12 configurations, 2 episodes of 25 steps each, 8 at a time."""
    rows = train(tmp_path / "run", 5, *CHOICES["sfl"])
    trials, iteration = 24 * 25, 8 * 8
    expected = [trials + iteration, trials + 2 * iteration, 2 * trials + 3 * iteration]
    assert [row["env_steps"] for row in rows[:3]] == expected
    assert rows[-1]["env_steps"] == 3 * trials + 5 * iteration
    # the budget is of all steps
    assert main(["train", *SMALL, *CHOICES["sfl"], f"out={tmp_path / 'budget'}", f"budget.env_steps={trials + 1}"]) == 0
    assert len(read_metrics(tmp_path / "budget" / "metrics.jsonl")) == 1


def test_a_sampler_that_scores_needs_a_learner_with_advantages(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embodied.algos.ppo import PPO, PPOOptions
    from embodied.spec import registry

    class Other:
        """As PPO, but without advantages."""

        validate = PPO.validate

        def __init__(self, *arguments: object) -> None:
            self.ppo = PPO(*arguments)

    registry.load()
    monkeypatch.setitem(registry._entries["algo"], "other", registry.Entry(Other, PPOOptions, "", {}))
    assert main(["train", *SMALL, "sampler=plr", "algo=other", f"out={tmp_path / 'x'}"]) == 2
    assert "sampler=plr scores configurations by advantages, which algo=other has not" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


class Spy(Uniform):
    """Uniform resets that keep what they are told, and what they drew."""

    def __init__(self, bank, worlds):
        super().__init__(UniformOptions(), bank.slots(worlds, 0, torch.device("cpu")))
        self.drawn, self.scored = [], []

    def sample(self):
        self.drawn.append(super().sample())
        return self.drawn[-1]

    def score(self, slots, abs_advantage):
        self.scored.append((slots, abs_advantage))


def test_scores_come_with_the_configuration_that_each_step_was_in() -> None:
    task, bank = make_task(episode_s=0.5), small_bank()
    spy = Spy(bank, 8)
    env = WorldsEnv(make_engine(task, 8), task, spy, bank)
    env.reset(0)
    expected, now = [], torch.full((8,), -1)  # first episodes belong to none
    action = torch.zeros(8, 6)
    for t in range(40):
        if t == 20:
            action[3, 0] = torch.nan  # world 3 is invalid in this step
        _, _, terminated, truncated, info = env.step(action)
        action[3, 0] = 0.0
        assert bool(info["invalid"][3]) == (t == 20)
        expected.append(torch.where(info["invalid"], -1, now))
        now = torch.where(terminated | truncated | info["invalid"], spy.drawn[-1], now)
        if t % 10 == 9:
            advantage = torch.randn(10, 8)
            assert env.end_iteration(advantage) == 0
            slots, absolute = spy.scored[-1]
            assert torch.equal(slots, torch.stack(expected[-10:])) and torch.equal(absolute, advantage.abs())
    assert (torch.stack(expected) >= 0).sum() > 200
    # of more steps than the learner learned from, the last
    for _ in range(4):
        env.step(action)
    env.end_iteration(torch.zeros(2, 8))
    assert len(spy.scored[-1][0]) == 2
    with pytest.raises(RuntimeError, match="the learner must give them"):
        env.end_iteration(None)


def test_the_learner_keeps_its_advantages() -> None:
    trainer = make_trainer()
    ppo = trainer.learner
    for _ in range(ppo.steps_per_iteration):
        obs, *outcome, info = trainer.env.step(ppo.act(trainer.obs))
        ppo.observe(obs, *outcome, info)
        trainer.obs = obs
    kept, options = copy.deepcopy(ppo.rollout), ppo.options
    with torch.no_grad():
        value = torch.stack([ppo.critic({"critic": x}) for x in kept.obs["critic"]])
    assert ppo.advantage.shape == (0, 8)
    ppo.update()
    for world in range(8):
        following = 0.0
        for t in reversed(range(options.num_steps)):
            nothing = bool(kept.terminated[t, world])
            delta = kept.reward[t, world] + (0 if nothing else options.gamma * kept.next_value[t, world]) - value[t, world]
            following = delta + (0 if kept.ended[t, world] else options.gamma * options.lam * following)
            assert ppo.advantage[t, world] == pytest.approx(float(following), abs=1e-4)


def test_in_the_midst_of_an_iteration_an_environment_that_scores_is_saved_whole() -> None:
    def fresh() -> WorldsEnv:
        task, bank = make_task(episode_s=0.5), small_bank()
        return WorldsEnv(make_engine(task, 8), task, PLR(PLROptions(), bank.slots(8, 0, torch.device("cpu"))), bank)

    one, two = fresh(), fresh()
    one.reset(0)
    for _ in range(20):
        one.step(torch.zeros(8, 6))
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for env in (one, two):
        for _ in range(10):
            env.step(torch.zeros(8, 6))
        env.end_iteration(torch.arange(240.0).view(30, 8))
    assert torch.equal(one.sampler.scores, two.sampler.scores) and one.sampler.met.any()
    for _ in range(5):
        one.step(torch.zeros(8, 6))
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert torch.equal(one.sampler.sample(), two.sampler.sample())
    assert torch.equal(one.sampler.probabilities, two.sampler.probabilities)


def test_trials_start_where_they_are_told_on_worlds_of_their_own() -> None:
    """A policy that does nothing succeeds only where the tip already is deep enough, and not disturbed."""
    task, bank = make_task(episode_s=0.5), small_bank()
    config = {"sim": {"num_worlds": 8, "engine": "cpu", "threads": 1}}
    policy = GaussianPolicy(MLPOptions(hidden=[4], min_std=1e-5, init_std=2e-5), task.obs_sizes, task.spec.action.size)
    policy.seed(0)
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.zero_()
    evaluate = make_trials(config, task, bank, policy, print)
    near = bank.difficulty.argsort()
    slots = torch.cat([near[:5], near[-15:]])
    trials = evaluate(slots, 11)
    assert trials.success.shape == trials.valid.shape == (20,) and trials.valid.all()
    assert trials.steps == 24 * task.spec.max_steps  # three batches of eight
    assert trials.success[:5].sum() >= 3 and not trials.success[5:].any()
    policy.seed(0)
    assert torch.equal(trials.success, evaluate(slots, 11).success)


def test_difficulty_is_the_distance_from_where_success_begins() -> None:
    bank = small_bank()
    assert bank.difficulty.shape == bank.tags.shape and bank.difficulty.dtype == torch.float64
    env = make_env(64, stagger=False, randomise=False)
    env.sampler.sample = lambda: torch.arange(64)
    env.reset(0)
    depth = env.task.errors(env._seen, env._state)["depth_m"].double()  # seen with a bias of half a millimetre
    short = (0.025 - depth).clamp(min=0)
    assert (bank.difficulty > short - 0.003).all()
    inserted, near, far = (bank.difficulty[bank.tags == i] for i in range(3))
    assert inserted.max() < 0.028 and (inserted - short[bank.tags == 0]).abs().max() < 0.003
    assert near.min() > 0.0245 and far.min() > 0.04 and far.max() < 0.13
    # the same from one row at a time, on fewer worlds than there are rows
    task = make_task()
    again = goal_distance(task, make_engine(task, 5), bank.rows)
    torch.testing.assert_close(again, bank.difficulty, rtol=0, atol=1e-6)
