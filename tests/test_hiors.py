"""Rejection sampling: what is kept against plain lists, and learning from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grpo import SIZES, Reach
from torch import Tensor

from embodied.algos.hiors import HiORS, HiORSOptions
from embodied.algos.trainer import Trainer
from embodied.policies.flow import FlowOptions, FlowPolicy
from embodied.policies.gaussian import GaussianPolicy, MLPOptions
from embodied.spec.errors import BadInput
from embodied.spec.protocols import Policy

LIMIT, WORLDS = 8, 5


def make(kind: str = "mlp", worlds: int = WORLDS, seed: int = 0, limit: int = LIMIT, **changes) -> HiORS:
    torch.manual_seed(0)
    flow = FlowOptions(hidden=[32, 32], horizon=2, execute=2)
    policy: Policy = FlowPolicy(flow, SIZES, 2) if kind == "flow" else GaussianPolicy(MLPOptions(hidden=[32]), SIZES, 2)
    options = HiORSOptions(**({"num_steps": 12, "updates": 4, "batch_size": 64} | changes))
    return HiORS(options, policy, SIZES, 2, worlds, "cpu", seed, None, limit)


Steps = list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]


def experience(learner: HiORS, steps: int, seed: int) -> Steps:
    """Random episodes of at most LIMIT steps, some of which are faulty or not complete; what was seen, done and came of it."""
    generator, done = torch.Generator().manual_seed(seed), []
    length = learner._at.float()
    for _ in range(steps):
        seen = torch.randn(WORLDS, 2, generator=generator)
        action = learner.act({"policy": seen})
        length += 1
        ended = (torch.rand(WORLDS, generator=generator) < 0.25) | (length == LIMIT)
        success, invalid, complete = (torch.rand(WORLDS, generator=generator) < share for share in (0.6, 0.05, 0.9))
        ended |= invalid
        length = torch.where(ended, 0, length)
        success, complete = success & ended & ~invalid, complete & ended & ~invalid
        info = {"success": success, "invalid": invalid, "episode": {"ended": complete}}
        learner.observe({}, torch.zeros(WORLDS), ended, torch.zeros_like(ended), info)
        done.append((seen, action, ended, complete, success, invalid))
    return done


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_what_is_kept_is_what_lists_of_episodes_say(seed: int) -> None:
    learner = make(quantile=0.5, gamma=0.9, idle=0.0)
    begin, threshold, expected, rising = [0] * WORLDS, 0.0, [], [0.0]
    done: Steps = []
    for iteration in range(6):
        worths = []
        done += experience(learner, 12, seed + iteration)
        for t in range(12 * iteration, 12 * iteration + 12):
            for world in range(WORLDS):
                if not done[t][2][world]:
                    continue
                span = range(begin[world], t + 1)
                begin[world] = t + 1
                if not done[t][3][world]:
                    continue
                worth = 0.9 ** len(span) if done[t][4][world] else 0.0
                worths.append(worth)
                if worth > 0 and worth >= threshold - 1e-12 and len(span) >= 3:
                    expected += [(done[i][0][world], done[i][1][world], t + 1 - i) for i in span]
        # nothing rises before two time limits have passed: 16 steps are over at the end of the second iteration
        if iteration >= 1:
            threshold = max(threshold, float(np.quantile(worths, 0.5)))
        figures = learner.update()
        assert float(figures["threshold"]) == pytest.approx(rising[-1])
        rising.append(learner.threshold)
        assert learner.threshold == pytest.approx(threshold)
        assert learner.count == len(expected)
        for i, (state, action, left) in enumerate(expected):
            assert torch.equal(learner.kept.state[i], state) and torch.equal(learner.kept.action[i], action)
            assert int(learner.kept.left[i]) == left
    assert rising == sorted(rising)


def test_a_full_ring_forgets_the_oldest_and_windows_stay_within_their_episodes() -> None:
    learner = make("flow", capacity=30, quantile=0.0)
    done = experience(learner, 400, 3)
    assert learner.count > 90
    by_state = {tuple(seen[world].tolist()): (t, world) for t, (seen, *_) in enumerate(done) for world in range(WORLDS)}
    obs, action, mask = learner.kept.at(torch.arange(30))
    for state, chunk, good in zip(obs["policy"], action, mask, strict=True):
        t, world = by_state[tuple(state.tolist())]
        assert bool(good[0]) and torch.equal(chunk[0], done[t][1][world])
        over = bool(done[t][2][world])
        assert bool(good[1]) == (not over)
        if not over:
            assert torch.equal(chunk[1], done[t + 1][1][world])


def test_who_stands_still_teaches_nothing() -> None:
    learner = make(idle=10.0, quantile=0.0)
    before = [x.clone() for x in learner.policy.parameters()]
    experience(learner, 40, 0)
    assert learner.count > 0
    figures = learner.update()
    assert float(figures["moments"]) == 0.0 and "imitation" not in figures
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["mlp", "flow"])
def test_saved_in_the_middle_of_episodes_it_continues_bit_for_bit(kind: str, tmp_path) -> None:
    one, other = make(kind), make(kind, seed=1)
    experience(one, 40, 0), one.update(), experience(one, 5, 1)
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for learner in (one, other):
        experience(learner, 30, 2), learner.update()
    assert one.threshold == other.threshold and one.count == other.count > 40
    assert all(torch.equal(a, b) for a, b in zip(one.policy.parameters(), other.policy.parameters(), strict=True))


def test_options_that_make_no_sense_are_refused() -> None:
    for changes, message in (
        ({"quantile": 1.5}, r"algo\.quantile=1\.5: expected in \[0, 1\]"),
        ({"gamma": 0.0}, r"algo\.gamma=0\.0: expected above 0"),
        ({"capacity": 0}, r"algo\.capacity=0: expected more than 0"),
        ({"co_data": "nowhere"}, r"algo\.co_data=nowhere is no folder"),
    ):
        with pytest.raises(BadInput, match=message):
            make(**changes)


@pytest.mark.learning
@pytest.mark.parametrize("kind", ["mlp", "flow"])
def test_it_learns_from_what_succeeded(kind: str) -> None:
    learner = make(kind, worlds=128, limit=Reach.max_episode_steps, learning_rate=3e-3, updates=32, min_steps=1, quantile=0.5)
    env = Reach(128)
    env.restart(1)
    trainer = Trainer(env, learner)
    trainer.obs = {"policy": env.x.clone()}
    success = [trainer.iterate()["success_rate"] for _ in range(60)]
    assert np.mean(success[:3]) < 0.5 and np.mean(success[-5:]) > 0.9
