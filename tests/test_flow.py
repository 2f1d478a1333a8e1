"""Flow policies: denoising steps against published vectors and closed forms, likelihoods against integration, imitation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from embodied.policies.flow import FlowOptions, FlowPolicy, schedule
from embodied.spec.errors import BadInput

METHODS = ("sde", "cps", "noise")


def make(obs_size: int = 2, action_size: int = 1, **changes) -> FlowPolicy:
    torch.manual_seed(0)
    options = FlowOptions(**({"hidden": [32, 32], "horizon": 2, "execute": 2} | changes))
    policy = FlowPolicy(options, {"policy": obs_size}, action_size)
    for parameter in policy.parameters():  # the last layers start near zero, where everything is alike
        parameter.data.add_(0.2 * torch.randn(parameter.shape))
    return policy


def observe(count: int, size: int = 2, seed: int = 1) -> dict[str, Tensor]:
    return {"policy": torch.randn(count, size, generator=torch.Generator().manual_seed(seed))}


# -- denoising steps -----------------------------------------------------------------------------------------------------


def test_flow_sde_has_the_published_coefficients() -> None:
    """K = 4, a = 0.5, by hand from arXiv 2510.25889."""
    found = schedule("sde", 4, 0.5)
    sigma = [1.0, math.sqrt(3) / 2, 0.5, math.sqrt(1 / 12)]
    assert found.time.tolist() == [1.0, 0.75, 0.5, 0.25]
    np.testing.assert_allclose(found.std, [s / 2 for s in sigma], rtol=1e-6)
    np.testing.assert_allclose(found.noise, [0.625, 0.375, 0.1875, -1 / 24], atol=1e-6)
    np.testing.assert_allclose(found.action, [0.25, 0.5, 0.75, 1.0], rtol=1e-6)


@pytest.mark.parametrize("method", ["ode", "sde", "cps", "noise"])
@pytest.mark.parametrize("steps", [2, 4, 10])
def test_means_are_those_of_the_ode_without_noise(method: str, steps: int) -> None:
    found, ode = schedule(method, steps, 1e-6), schedule("ode", steps, 0.0)
    np.testing.assert_allclose(found.noise, ode.noise, atol=1e-5)
    np.testing.assert_allclose(found.action + ode.noise, 1.0, atol=1e-6)
    # Euler: weights of x and v
    t = found.time
    np.testing.assert_allclose(ode.action + ode.noise, 1.0, atol=1e-6)
    np.testing.assert_allclose(ode.noise * (1 - t) - ode.action * t, -torch.full((steps,), 1 / steps), atol=1e-6)


class Exact(nn.Module):
    """The velocity where all data is one point: (x - point) / t, of a policy whose chunk is one number."""

    def __init__(self, point: float, steps: int) -> None:
        super().__init__()
        self.point, self.steps, self.calls = point, steps, 0

    def forward(self, inputs: Tensor) -> Tensor:
        # times are told by sines: count them instead
        time = 1.0 - (self.calls % self.steps) / self.steps
        self.calls += 1
        return (inputs[:, 2:3] - self.point) / time


@pytest.mark.parametrize("method", ["sde", "cps"])
def test_cps_keeps_the_marginals_and_coarse_flow_sde_does_not(method: str) -> None:
    """With every step noisy and the exact velocity of a point a, x_t should be N((1 - t) a, t^2)."""
    policy, count, a = make(horizon=1, execute=1, method=method), 200_000, 0.7
    policy.network = Exact(a, 4)
    x = torch.randn(count, 1, generator=torch.Generator().manual_seed(0))
    variance = 1.0
    for k in range(4):
        mean, std = policy.transition(torch.zeros(count, 2), x, torch.full((count,), k), torch.ones(count, dtype=torch.bool))
        x = mean + std * torch.randn(count, 1)
        t, left = 1 - k / 4, 1 - (k + 1) / 4
        # by hand: e^ = (x - (1 - t) a) / t has variance var(x) / t^2
        found = schedule(method, 4, 0.5)
        variance = float(found.noise[k]) ** 2 * variance / t**2 + float(found.std[k]) ** 2
        assert float(x.mean()) == pytest.approx((1 - left) * a, abs=4 * math.sqrt(variance / count) + 1e-6)
        assert float(x.var()) == pytest.approx(variance, rel=0.02, abs=1e-6)
        if method == "cps":
            assert variance == pytest.approx(left**2, abs=1e-6)
        else:
            assert variance > left**2 + 0.02
    if method == "sde":
        one_step = found.noise.square() + found.std.square()
        np.testing.assert_allclose(one_step, [0.641, 0.328, 0.098, 0.023], atol=1e-3)


def test_a_deterministic_chunk_is_eulers_from_its_noise() -> None:
    policy, obs = make(horizon=2, action_size=3), observe(50)
    step = policy.act(obs, deterministic=True)
    chain, seen = step.trace["chain"], policy.normaliser(obs["policy"])
    x = chain[:, 0].clone()
    assert float(x.std()) == pytest.approx(1.0, abs=0.1)
    for k in range(4):
        x = x - policy.velocity(seen, x, torch.full((50,), 1 - k / 4)) / 4
        torch.testing.assert_close(chain[:, k + 1], x, atol=2e-6, rtol=1e-5)
    assert step.action.shape == (50, 2, 3) and torch.equal(step.action.flatten(1), chain[:, -1])


# -- likelihood ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mean_log_prob", [False, True])
def test_the_ratio_is_one_until_weights_change(method: str, mean_log_prob: bool) -> None:
    policy, obs = make(method=method, mean_log_prob=mean_log_prob), observe(64)
    step = policy.act(obs)
    assert torch.equal(policy.evaluate(obs, step.trace).log_prob, step.log_prob)
    next(policy.network.parameters()).data.mul_(1.1)
    assert not torch.allclose(policy.evaluate(obs, step.trace).log_prob, step.log_prob, atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_nobody_is_answered_with_nothing(method: str) -> None:
    policy = make(method=method)
    step = policy.act(observe(0))
    assert step.action.shape == (0, 2, 1) and step.log_prob.shape == (0,) and step.trace["chain"].shape == (0, 5, 2)


@pytest.mark.parametrize("method", METHODS)
def test_log_probability_is_that_of_the_noisy_steps(method: str) -> None:
    """Against SciPy's normal density of each step, from the policy's own means."""
    policy, obs, count = make(method=method, action_size=2), observe(40), 40
    step = policy.act(obs)
    chain, index = step.trace["chain"], step.trace["index"]
    total = np.zeros(count)
    seen = policy.normaliser(obs["policy"])
    for k in range(4):
        noisy = (index == k) | (index < 0)
        with torch.no_grad():
            mean, std = policy.transition(seen, chain[:, k], torch.full((count,), k), noisy)
        on = noisy.numpy()
        density = stats.norm.logpdf(chain[:, k + 1][on], mean[on], std[on]).sum(1)
        total[on] += density
        # the other steps are Euler's, exactly
        torch.testing.assert_close(chain[:, k + 1][~noisy], mean[~noisy], atol=1e-6, rtol=0)
    np.testing.assert_allclose(step.log_prob, total, rtol=1e-4, atol=1e-4)
    policy.options.mean_log_prob = True
    terms = 4 * 4 if method == "noise" else 4
    np.testing.assert_allclose(policy.evaluate(obs, step.trace).log_prob.detach(), total / terms, rtol=1e-4, atol=1e-4)
    if method == "cps":
        assert set(index.tolist()) == {0, 1, 2}  # the last step has no noise


def test_the_likelihood_of_chains_integrates_to_what_is_sampled() -> None:
    """One number, two noisy steps from the same noise: the density of where they end, integrated over where they pass."""
    policy = make(horizon=1, execute=1, steps=2, method="noise", noise_std=[0.3, 0.6])
    count, start = 60_000, 0.8
    obs = {"policy": torch.tensor([[0.3, -0.5]]).expand(count, 2)}
    grid = torch.linspace(-5, 5, 801)
    ends = torch.linspace(-4, 4, 401)
    passes, ends_grid = (x.flatten() for x in torch.meshgrid(grid, ends, indexing="ij"))
    chain = torch.stack([torch.full_like(passes, start), passes, ends_grid], 1)[..., None]
    trace = {"chain": chain, "index": torch.full((len(chain),), -1)}
    with torch.no_grad():
        density = policy.evaluate({"policy": obs["policy"][:1].expand(len(chain), 2)}, trace).log_prob.exp().view(801, 401)
    marginal = torch.trapezoid(density, grid, dim=0)
    assert float(torch.trapezoid(marginal, ends)) == pytest.approx(1.0, abs=1e-3)
    x = torch.full((count, 1), start)
    seen = policy.normaliser(obs["policy"])
    with torch.no_grad():
        for k in range(2):
            mean, std = policy.transition(seen, x, torch.full((count,), k), torch.ones(count, dtype=torch.bool))
            x = mean + std * torch.randn(count, 1, generator=policy.generator)
    cumulative = torch.cumulative_trapezoid(marginal, ends)
    found = stats.kstest(x[:, 0].numpy(), lambda q: np.interp(q, ends[1:].numpy(), cumulative.numpy()))
    assert found.pvalue > 1e-3


def test_the_noisy_step_is_drawn_for_each_world_or_for_all() -> None:
    index = make().act(observe(4000)).trace["index"]
    assert stats.chisquare(torch.bincount(index, minlength=4).numpy()).pvalue > 1e-3
    policy = make(shared_index=True)
    drawn = [policy.act(observe(10)).trace["index"].unique() for _ in range(60)]
    assert all(len(one) == 1 for one in drawn) and len(torch.cat(drawn).unique()) == 4


def test_noise_of_the_network_stays_in_its_bounds() -> None:
    policy = make(method="noise")
    for parameter in policy.noise_network.parameters():
        parameter.data.mul_(20.0)
    x, step = torch.randn(500, 2), torch.randint(4, (500,))
    with torch.no_grad():
        _, std = policy.transition(torch.randn(500, 2), x, step, torch.ones(500, dtype=torch.bool))
    assert 0.08 - 1e-6 <= float(std.min()) < 0.085 and 0.15 < float(std.max()) <= 0.16 + 1e-6


# -- imitation -----------------------------------------------------------------------------------------------------------


def test_what_lies_behind_the_end_is_not_imitated() -> None:
    policy, obs = make(horizon=4, execute=4, action_size=2), observe(30)
    action, mask = torch.randn(30, 4, 2), torch.arange(4).expand(30, 4) < torch.randint(1, 5, (30, 1))
    losses = []
    for junk in (0.0, 100.0):
        policy.seed(3)
        shown = torch.where(mask[..., None], action, junk)
        losses.append(float(policy.imitate(obs, shown, mask).detach()))
    assert losses[0] == losses[1] > 0
    policy.seed(3)
    assert float(policy.imitate(obs, action, torch.zeros_like(mask)).detach()) == 0.0


def test_imitation_learns_both_ways_round_an_obstacle_where_a_mean_would_hit_it() -> None:
    """Half of the demonstrations pass left (-0.8), half right (0.8); their mean is 0."""
    generator = torch.Generator().manual_seed(0)
    side = 1.0 - 2.0 * (torch.rand(2000, generator=generator) < 0.5).float()
    action = (0.8 * side[:, None] + 0.05 * torch.randn(2000, 2, generator=generator))[..., None]
    obs, mask = observe(2000), torch.ones(2000, 2, dtype=torch.bool)
    torch.manual_seed(0)
    policy = FlowPolicy(FlowOptions(hidden=[64, 64], horizon=2, execute=2, steps=8), {"policy": 2}, 1)
    policy.take_statistics(obs, action.flatten(0, 1))
    optimiser = torch.optim.Adam(policy.parameters(), 3e-3)
    for _ in range(1200):
        pick = torch.randint(2000, (256,), generator=generator)
        loss = policy.imitate({"policy": obs["policy"][pick]}, action[pick], mask[pick])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    chunks = policy.act(observe(1000, seed=7), deterministic=True).action[..., 0]
    near = (chunks.abs() - 0.8).abs() < 0.25
    assert float(near.all(1).float().mean()) > 0.9
    left = float((chunks[:, 0] < 0).float().mean())
    assert 0.4 < left < 0.6
    assert bool((chunks[near.all(1)].sign().std(1) == 0).all())  # a chunk keeps to its side


def test_statistics_of_demonstrations_are_kept() -> None:
    policy = make(action_size=2)
    obs, action = observe(300), torch.randn(300, 2) * torch.tensor([0.1, 2.0]) + torch.tensor([0.5, -1.0])
    policy.take_statistics(obs, action)
    np.testing.assert_allclose(policy.action_mean, action.mean(0), rtol=1e-5)
    np.testing.assert_allclose(policy.action_std, action.std(0), rtol=1e-5)
    before = policy.normaliser.shift.clone()
    policy.update_normaliser({"policy": 100 + obs["policy"]}, torch.ones(300, dtype=torch.bool))
    policy.begin_at(0.9)
    assert torch.equal(policy.normaliser.shift, before) and float(policy.action_mean[0]) != pytest.approx(0.9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "sdee"}, "policy.method=sdee: did you mean 'sde'"),
        ({"execute": 3}, "policy.execute=3: expected 1 to policy.horizon=2"),
        ({"steps": 1}, "policy.steps=1: expected at least 2"),
        ({"method": "cps", "noise": 1.5}, "policy.noise=1.5"),
        ({"noise_std": [0.2, 0.1]}, r"policy.noise_std=\[0.2, 0.1\]"),
    ],
)
def test_impossible_options_are_refused(change: dict, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        make(**change)
