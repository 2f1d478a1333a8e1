"""Imitation beside reinforcement: its gradient by hand, and that it is there at every step and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_imitation import FEATURES, GAIN, write
from test_ppo import PointMass, collect

from embodied.algos.ppo import PPO, PPOOptions
from embodied.algos.sft import SFT, SFTOptions
from embodied.policies.flow import FlowOptions, FlowPolicy
from embodied.policies.gaussian import GaussianPolicy, MLPOptions
from embodied.spec.errors import BadInput

SIZES, WORLDS = {"policy": 3, "critic": 3}, 16
OPTIONS = PPOOptions(num_steps=6, critic_hidden=[16], co_weight=0.5, co_batch_size=32, epochs=1, minibatch_size=6 * WORLDS)


class Point(PointMass):
    """It sees the time, too, as the data have three numbers."""

    def obs(self, x):
        seen = super().obs(x)
        return seen | {"policy": seen["critic"].clone()}


def make(kind: str, data: Path | None, seed: int = 0, **changes) -> PPO:
    torch.manual_seed(seed)
    flow = FlowOptions(hidden=[16], horizon=2, execute=2)
    policy = FlowPolicy(flow, SIZES, 2) if kind == "flow" else GaussianPolicy(MLPOptions(hidden=[16]), SIZES, 2)
    options = replace(OPTIONS, co_data=str(data or ""), **changes)
    return PPO(options, policy, SIZES, 2, WORLDS, "cpu", seed)


def first_gradient(ppo: PPO) -> torch.Tensor:
    """Of the policy, at the only gradient step of an update, as it was before it was clipped (nearly: it never is here)."""
    collect(ppo, Point())
    ppo.update()
    return ppo.surrogate._flat[0].grad.clone()


@pytest.mark.parametrize("kind", ["mlp", "flow"])
def test_the_gradient_is_the_sum_of_both_and_each_is_a_mean_of_its_own_batch(kind: str, tmp_path) -> None:
    data = write(tmp_path / "data", [30] * 4, [True] * 4)
    alone, both = (make(kind, d, max_grad_norm=1e6) for d in (None, data))
    # what is imitated, and its noise, are drawn after the rollout from the streams of the learner
    collect(both, Point())
    noise, order = both.policy.generator.get_state(), both.surrogate.co.generator.get_state()
    with torch.enable_grad():
        loss = both.surrogate.co.loss()
        by_hand = torch.cat(
            [
                x.flatten()
                for x in torch.autograd.grad(loss, [*both.policy.parameters()], allow_unused=True, materialize_grads=True)
            ]
        )
    both.policy.generator.set_state(noise), both.surrogate.co.generator.set_state(order)
    metrics = both.update()
    assert float(metrics["co_imitation"]) == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(both.surrogate._flat[0].grad, first_gradient(alone) + 0.5 * by_hand, atol=1e-6, rtol=1e-4)


def test_the_failed_are_left_out_where_the_data_tell(tmp_path) -> None:
    ppo = make("mlp", write(tmp_path / "data", [5, 2, 4], [True, False, True]))
    assert len(ppo.surrogate.co.windows.left) == 9


def test_it_draws_a_policy_to_the_data(tmp_path) -> None:
    data = write(tmp_path / "data", [50] * 10, [True] * 10)
    state = 2 * torch.rand(400, 3, generator=torch.Generator().manual_seed(5)) - 1
    errors = []
    for d in (None, data):
        ppo, env, obs = (
            make("mlp", d, co_weight=20.0, epochs=4, minibatch_size=None, desired_kl=None, learning_rate=3e-3),
            Point(),
            None,
        )
        for _ in range(60):
            obs = collect(ppo, env, obs)
            ppo.update()
        done = ppo.policy.act({"policy": state}, deterministic=True).action[:, 0]
        errors.append(float((done - state @ torch.from_numpy(GAIN)).square().mean()))
    assert errors[1] < 0.2 * errors[0]


@pytest.mark.parametrize("kind", ["mlp", "flow"])
def test_it_continues_bit_for_bit_on_the_same_data_alone(kind: str, tmp_path) -> None:
    data = write(tmp_path / "data", [30] * 4, [True] * 4)
    one, other = make(kind, data), make(kind, data, seed=1)
    first_gradient(one)
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(first_gradient(one), first_gradient(other))
    changed = make(kind, write(tmp_path / "changed", [30] * 4, [True] * 4, seed=1))
    with pytest.raises(BadInput, match=r"algo\.co_data=.* has changed since"):
        changed.load_state_dict(one.state_dict())


def test_two_sources_are_imitated_and_normalise_together(tmp_path) -> None:
    first = write(tmp_path / "first", [40] * 4, [True] * 4)
    second = write(tmp_path / "second", [40] * 4, [True] * 4, seed=1)
    options = SFTOptions(data=str(first), co_data=str(second), co_weight=1.0, updates=5)
    sft = SFT(options, GaussianPolicy(MLPOptions(hidden=[16]), SIZES, 2), SIZES, 2, 1, "cpu", 0)
    state = torch.cat([sft.windows.state, sft.co.windows.state])
    assert len(state) == 320 and FEATURES["observation.state"].shape == (3,)
    torch.testing.assert_close(sft.policy.normaliser.mean, state.double().mean(0), atol=1e-4, rtol=1e-3)
    sft.update()
    assert sft.co.generator.get_state().tolist() != torch.Generator().manual_seed(0).get_state().tolist()


def test_options_are_checked_before_anything_is_built() -> None:
    for changes, message in (
        ({"co_data": "nowhere"}, r"algo\.co_data=nowhere is no folder: expected a dataset"),
        ({"co_weight": 0.0}, r"algo\.co_weight=0\.0: expected more than 0"),
        ({"co_batch_size": 0}, r"algo\.co_batch_size=0: expected more than 0"),
    ):
        with pytest.raises(BadInput, match=message):
            PPO.validate(replace(OPTIONS, **changes), WORLDS)
