import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.algos.losses import adapted_rate, approx_kl, clip_fraction, clipped_surrogate, value_loss, weighted
from embodied.algos.returns import explained_variance, gae, normalise

GAMMA, LAM = 0.9, 0.8


def draw_rollout(seed: int, steps: int = 12, worlds: int = 5):
    """reward, value, next_value [T, N] and the masks terminated, truncated, invalid."""
    rng = np.random.default_rng(seed)
    floats = [torch.from_numpy(rng.standard_normal((steps, worlds))).float() for _ in range(3)]
    masks = [torch.from_numpy(rng.random((steps, worlds)) < share) for share in (0.15, 0.15, 0.1)]
    return *floats, *masks


def reference(reward, value, next_value, terminated, ended, valid, gamma=GAMMA, lam=LAM):
    """The definition: for every step, the discounted sum of the TD errors that follow it in its own episode."""
    steps, worlds = reward.shape
    out = np.zeros((steps, worlds))
    for n in range(worlds):
        for t in range(steps):
            for k in range(t, steps):
                if not valid[k, n]:
                    break
                after = 0.0 if terminated[k, n] else next_value[k, n].item()
                error = reward[k, n].item() + gamma * after - value[k, n].item()
                out[t, n] += (gamma * lam) ** (k - t) * error
                if ended[k, n]:
                    break
    return torch.from_numpy(out).float()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6))
def test_gae_agrees_with_its_definition(seed):
    reward, value, next_value, terminated, truncated, invalid = draw_rollout(seed)
    ended, valid = terminated | truncated | invalid, ~invalid
    out = gae(reward, value, next_value, terminated, ended, GAMMA, LAM, valid)
    torch.testing.assert_close(out, reference(reward, value, next_value, terminated, ended, valid))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 10), st.integers(0, 4))
def test_nothing_leaks_across_the_end_of_an_episode(seed, end, world):
    reward, value, next_value, terminated, truncated, invalid = draw_rollout(seed)
    ended = terminated | truncated | invalid
    ended[end, world] = True
    before = gae(reward, value, next_value, terminated, ended, GAMMA, LAM, ~invalid)
    for changed in (reward, value, next_value):
        changed[end + 1 :, world] += 1e6
    after = gae(reward, value, next_value, terminated, ended, GAMMA, LAM, ~invalid)
    assert torch.equal(after[: end + 1, world], before[: end + 1, world])
    if not invalid[end + 1, world]:
        assert after[end + 1, world] != before[end + 1, world]
    others = torch.arange(5) != world
    assert torch.equal(after[:, others], before[:, others])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6))
def test_nan_where_not_valid_or_beyond_a_termination_is_harmless(seed):
    reward, value, next_value, terminated, truncated, invalid = draw_rollout(seed)
    ended, valid = terminated | truncated | invalid, ~invalid
    clean = gae(reward, value, next_value, terminated, ended, GAMMA, LAM, valid)
    for x in (reward, value, next_value):
        x[invalid] = torch.nan
    next_value[terminated] = torch.nan
    assert torch.equal(gae(reward, value, next_value, terminated, ended, GAMMA, LAM, valid), clean)


def test_one_long_episode_with_lam_one_is_the_discounted_sum():
    reward = torch.tensor([[1.0], [2.0], [4.0]])
    value = torch.tensor([[5.0], [6.0], [7.0]])
    next_value = torch.tensor([[6.0], [7.0], [8.0]])
    no = torch.zeros(3, 1, dtype=torch.bool)
    out = gae(reward, value, next_value, no, no, 0.5, 1.0) + value
    assert out[0].item() == 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 8


def counting_rollout(gamma, steps=20, worlds=40, limit=5):
    """x grows by one a step and is the reward; each episode is cut after `limit` steps and begins at a new x."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, 10, (steps // limit, worlds))
    x = torch.from_numpy(np.concatenate([s + np.arange(limit)[:, None] for s in start])).float()
    truncated = (torch.arange(steps) % limit == limit - 1).unsqueeze(1).expand(steps, worlds)
    return x, truncated


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_time_limits_are_bootstrapped_from_the_true_next_state(lam):
    gamma = 0.9
    x, truncated = counting_rollout(gamma)
    slope, offset = 0.0, 0.0
    for _ in range(400):  # fit a linear critic to its own returns until it no longer changes
        value, next_value = slope * x + offset, slope * (x + 1) + offset
        target = gae(x, value, next_value, torch.zeros_like(truncated), truncated, gamma, lam) + value
        slope, offset = np.polyfit(x.flatten().double(), target.flatten().double(), 1)
    assert slope == pytest.approx(1 / (1 - gamma), rel=1e-4)
    assert offset == pytest.approx(gamma / (1 - gamma) ** 2, rel=1e-4)


def test_normalised_advantage_has_mean_0_and_deviation_1_over_the_valid():
    advantage = 7 + 3 * torch.randn(30, 40)
    valid = torch.rand(30, 40) < 0.8
    advantage[~valid] = torch.nan
    out = normalise(advantage, valid)
    kept = advantage[valid].double()
    torch.testing.assert_close(out[valid].double(), (kept - kept.mean()) / kept.std(correction=0), atol=1e-4, rtol=1e-4)
    assert not out[~valid].any()


def test_equal_advantages_normalise_to_zero():
    assert not normalise(torch.full((3, 4), 2.0), torch.ones(3, 4, dtype=torch.bool)).any()


def test_explained_variance_of_a_perfect_and_of_a_constant_critic():
    returns, valid = torch.randn(6, 7), torch.rand(6, 7) < 0.8
    returns[~valid] = torch.nan
    assert explained_variance(returns, returns, valid) == 1
    assert explained_variance(torch.zeros(6, 7), returns, valid).item() == pytest.approx(0, abs=1e-6)
    half = explained_variance(returns / 2, returns, valid).item()
    assert half == pytest.approx(0.75, abs=1e-5)  # a quarter of the variance is left


def test_clipped_surrogate_by_hand():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1, 9.0])
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0, 1.0, 1.0])
    weight = torch.tensor([0.2] * 5 + [0.0])
    expected = -(1.2 * 2 - 1.5 * 2 + 0.5 * 2 - 0.8 * 2 + 1.1) / 5
    log_ratio = ratio.log().requires_grad_()
    loss = clipped_surrogate(log_ratio, advantage, weight, 0.2, 0.2)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    loss.backward()
    # of a clipped gain nothing more is to be had; a loss is felt however far
    assert [g != 0 for g in log_ratio.grad.tolist()] == [False, True, True, False, True, False]
    assert clip_fraction(log_ratio, weight, 0.2, 0.2).item() == pytest.approx(4 / 5)


def test_what_has_no_weight_may_hold_anything():
    x, weight = torch.tensor([1.0, torch.nan, 4.0]), torch.tensor([0.5, 0.0, 0.5])
    assert weighted(x, weight) == 2.5
    assert value_loss(x, torch.tensor([0.0, 5.0, 6.0]), weight) == 2.5
    assert weighted(x, torch.zeros(3)) == 0


def test_approx_kl_estimates_that_of_two_gaussians():
    generator = torch.Generator().manual_seed(0)
    old_std, new_std, shift = 1.0, 1.1, 0.2
    x = torch.randn(200_000, generator=generator, dtype=torch.float64)
    log_ratio = torch.distributions.Normal(shift, new_std).log_prob(x) - torch.distributions.Normal(0, 1).log_prob(x)
    exact = math.log(new_std / old_std) + (old_std**2 + shift**2) / (2 * new_std**2) - 0.5
    weight = torch.full((200_000,), 1 / 200_000, dtype=torch.float64)
    assert approx_kl(log_ratio, weight).item() == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(
    ("rate", "kl", "expected"),
    [(1e-3, 0.03, 1e-3 / 1.5), (1e-3, 0.001, 1.5e-3), (1e-3, 0.01, 1e-3), (1e-2, 0.0, 1e-2), (1e-5, 1.0, 1e-5)],
)
def test_learning_rate_follows_the_kl_within_its_bounds(rate, kl, expected):
    out = adapted_rate(torch.tensor(rate), torch.tensor(kl), 0.01, (1e-5, 1e-2))
    assert out.item() == pytest.approx(expected, rel=1e-5)
