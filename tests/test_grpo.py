"""Episodes compared with those of their group: against plain recursion, on real physics, and learning from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worlds import make_env

from embodied.algos.grpo import GRPO, GRPOOptions
from embodied.algos.returns import group_advantage
from embodied.algos.trainer import Trainer
from embodied.policies.flow import FlowOptions, FlowPolicy
from embodied.policies.gaussian import GaussianPolicy, MLPOptions
from embodied.spec.errors import BadInput
from embodied.spec.protocols import Policy

SIZES = {"policy": 2, "critic": 2}

# -- advantages ----------------------------------------------------------------------------------------------------------


def by_hand(outcome: Tensor, ended: Tensor, valid: Tensor, latest: int, group: int, keep: tuple[float, float]):
    """By lists of episodes; the advantage of each step that counts, and the share of groups kept."""
    steps, worlds = outcome.shape
    found: dict[tuple[int, int], float] = {}
    kept = 0
    for first in range(0, worlds, group):
        episodes = []
        for world in range(first, first + group):
            begin = 0
            for t in range(steps):
                if ended[t, world]:
                    if begin <= latest and valid[t, world]:
                        episodes.append((world, begin, t, float(outcome[t, world])))
                    begin = t + 1
        results = [result for *_, result in episodes]
        if len(results) > 0 and keep[0] <= np.mean(results) <= keep[1] and np.std(results) > 0:
            kept += 1
            for world, begin, end, result in episodes:
                for t in range(begin, end + 1):
                    found[t, world] = (result - np.mean(results)) / np.std(results)
    return found, kept / (worlds // group)


@settings(max_examples=200)
@given(seed=st.integers(0, 2**31), latest=st.integers(0, 9))
def test_advantages_are_those_of_lists_of_episodes(seed: int, latest: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    steps, worlds = 10, 8
    ended, valid, outcome = (torch.rand(steps, worlds, generator=generator) < share for share in (0.3, 0.95, 0.5))
    ended |= ~valid
    found = (outcome.float(), ended, valid, latest, 4, (0.2, 0.8))
    advantage, counted, kept = group_advantage(*found)
    expected, share = by_hand(*found)
    assert sorted(expected) == [tuple(at) for at in counted.nonzero().tolist()]
    for t in range(steps):
        for world in range(worlds):
            assert float(advantage[t, world]) == pytest.approx(expected.get((t, world), 0.0), abs=1e-3)
    assert float(kept) == pytest.approx(share)


def test_advantages_of_a_group_of_four_of_which_one_succeeded() -> None:
    """(1 - .25) / sqrt(3 / 16) is the square root of 3."""
    ended = torch.tensor([[False, True, False, True], [True, True, True, True]])
    outcome = torch.tensor([[0.0, 1, 0, 0], [0, 1, 0, 1]])
    advantage, counted, kept = group_advantage(outcome, ended, torch.ones_like(ended), 0, 4, (0.1, 0.9))
    low, high = -(3**-0.5), 3**0.5
    torch.testing.assert_close(advantage, torch.tensor([[low, high, low, low], [low, 0, low, 0]]), atol=1e-4, rtol=0)
    assert counted.tolist() == [[True] * 4, [True, False, True, False]] and float(kept) == 1.0


# -- worlds --------------------------------------------------------------------------------------------------------------


def test_a_group_begins_every_episode_at_one_configuration_of_the_bank() -> None:
    env = make_env(8, episode_s=0.6)
    env.reset(0)
    generator = torch.Generator().manual_seed(1)
    begun = []
    for _ in range(2):
        env.step(torch.zeros(8, env.action_size))
        env.restart(4)
        begun.append(env._slots.clone())
        one, two = env.engine.read("qpos").view(2, 4, -1)
        assert (
            torch.equal(one, one[:1].expand_as(one)) and torch.equal(two, two[:1].expand_as(two)) and not torch.equal(one, two)
        )
        assert begun[-1].view(2, 4).unique(dim=1).shape == (2, 1)
        ended = torch.zeros(8, dtype=torch.int64)
        for _ in range(40):
            action = 2 * torch.rand(8, env.action_size, generator=generator) - 1
            _, _, terminated, truncated, info = env.step(action)
            ended += terminated | truncated | info["invalid"]
            assert torch.equal(env._slots, begun[-1])
        assert int(ended.min()) >= 2
    assert not torch.equal(*begun)


def test_a_saved_environment_keeps_its_groups() -> None:
    env = make_env(8, episode_s=0.6)
    env.reset(0)
    env.restart(4)
    other = make_env(8, episode_s=0.6)
    other.reset(5)
    other.load_state_dict(env.state_dict())
    for _ in range(20):
        one, two = (e.step(torch.zeros(8, env.action_size))[0]["critic"] for e in (env, other))
        assert torch.equal(one, two)
    assert torch.equal(env._slots, other._slots)


# -- learning ------------------------------------------------------------------------------------------------------------


class Reach:
    """A point is moved by the action; within .2 of the origin it succeeds, and after 6 steps it has failed."""

    max_episode_steps = 6

    def __init__(self, worlds: int, seed: int = 0) -> None:
        self.num_worlds = worlds
        self.generator = torch.Generator().manual_seed(seed)

    def restart(self, group: int) -> dict[str, Tensor]:
        angle = 6.28 * torch.rand(self.num_worlds // group, 1, generator=self.generator)
        self.begin = torch.cat([angle.cos(), angle.sin()], 1).repeat_interleave(group, 0)
        self.x, self.steps = self.begin.clone(), torch.zeros(self.num_worlds)
        return {"policy": self.x.clone()}

    def step(self, action: Tensor):
        self.x, self.steps = self.x + 0.4 * action, self.steps + 1
        success = self.x.norm(dim=1) < 0.2
        terminated, nothing = success | (self.steps >= 6), torch.zeros(self.num_worlds)
        self.x = torch.where(terminated[:, None], self.begin, self.x)
        self.steps = torch.where(terminated, 0, self.steps)
        info = {"success": success, "invalid": nothing.bool(), "final_obs": {}}
        info["episode"] = {"ended": terminated, "return": nothing, "length": nothing}
        return {"policy": self.x.clone()}, nothing, terminated, nothing.bool(), info

    def end_iteration(self, advantage: Tensor | None) -> int:
        assert advantage is None
        return 0

    def metrics(self) -> dict[str, Tensor]:
        return {}


def make(kind: str, worlds: int = 64, options: GRPOOptions | None = None) -> GRPO:
    torch.manual_seed(0)
    flow = FlowOptions(hidden=[32, 32], horizon=2, execute=2, noise=0.8)
    policy: Policy = FlowPolicy(flow, SIZES, 2) if kind == "flow" else GaussianPolicy(MLPOptions(hidden=[32]), SIZES, 2)
    return GRPO(options or GRPOOptions(num_steps=12), policy, SIZES, 2, worlds, "cpu", 0, None, Reach.max_episode_steps)


@pytest.mark.learning
@pytest.mark.parametrize("kind", ["mlp", "flow"])
def test_it_learns_from_success_alone(kind: str) -> None:
    options = GRPOOptions(num_steps=12, learning_rate=1e-3, desired_kl=0.03, keep=[0.0, 1.0])
    trainer = Trainer(Reach(256), make(kind, 256, options))
    success = [trainer.iterate()["success_rate"] for _ in range(60)]
    assert np.mean(success[:3]) < 0.5 and np.mean(success[-5:]) > 0.9


def test_groups_in_which_nothing_differs_leave_the_weights_alone() -> None:
    # nobody succeeds always, so that none of these groups varies
    grpo = make("mlp", options=GRPOOptions(num_steps=12, keep=[0.999, 1.0]))
    before = [x.clone() for x in grpo.policy.parameters()]
    row = Trainer(Reach(64), grpo).iterate()
    assert row["loss/groups_kept"] == 0.0 and "loss/policy_loss" not in row
    assert all(torch.equal(a, b) for a, b in zip(before, grpo.policy.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["mlp", "flow"])
def test_it_continues_bit_for_bit(kind: str, tmp_path) -> None:
    one, other = make(kind), make(kind)
    trainer = Trainer(Reach(64), one)
    trainer.iterate()
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.policy.seed(99)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for learner in (one, other):
        Trainer(Reach(64, seed=3), learner).iterate()
    assert all(torch.equal(a, b) for a, b in zip(one.policy.parameters(), other.policy.parameters(), strict=True))


def test_options_that_make_no_sense_are_refused() -> None:
    for changes, message in (
        ({"group_size": 3}, r"algo\.group_size=3: expected 2 or more, and a divisor of sim\.num_worlds=64"),
        ({"group_size": 1}, r"algo\.group_size=1"),
        ({"keep": [0.9, 0.1]}, r"algo\.keep=\[0\.9, 0\.1\]: expected \[low, high\]"),
        ({"num_steps": 5}, r"algo\.num_steps=5: expected 6, which an episode may take, or more"),
        ({"clip_high": 0.0}, r"algo\.clip_high=0\.0: expected above 0"),
    ):
        with pytest.raises(BadInput, match=message):
            make("mlp", options=replace(GRPOOptions(), **changes))
