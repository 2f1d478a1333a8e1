"""Diffusion policies: denoising steps against diffusers', likelihoods against SciPy, imitation, and learning by PPO."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from scipy import stats
from test_chunks import SIZES, WORLDS, PointMass, collect
from test_flow import observe
from torch import Tensor, nn

from embodied.algos.ppo import PPO, PPOOptions
from embodied.policies.denoising import denoise
from embodied.policies.diffusion import DiffusionOptions, DiffusionPolicy
from embodied.spec.errors import BadInput

SMALL = {"hidden": [32, 32], "horizon": 2, "execute": 2}


def make(obs_size: int = 2, action_size: int = 1, **changes) -> DiffusionPolicy:
    torch.manual_seed(0)
    policy = DiffusionPolicy(DiffusionOptions(**(SMALL | changes)), {"policy": obs_size}, action_size)
    for parameter in policy.parameters():  # the last layer starts near zero, where everything is alike
        parameter.data.add_(0.2 * torch.randn(parameter.shape))
    return policy


def reference(steps: int, train_steps: int) -> DDIMScheduler:
    """In float64, for its noise is a difference of nearly equal numbers where there is hardly any signal."""
    found = DDIMScheduler(
        train_steps,
        beta_schedule="squaredcos_cap_v2",
        clip_sample=False,
        timestep_spacing="trailing",
        prediction_type="epsilon",
    )
    found.alphas_cumprod = found.alphas_cumprod.double()
    found.set_timesteps(steps)
    return found


def row_step(scheduler: DDIMScheduler, time: int, noise: Tensor, x: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of diffusers' step: without variance noise, and what a unit of it adds."""
    zero = torch.zeros_like(x)
    mean = scheduler.step(noise, time, x, eta, variance_noise=zero).prev_sample
    return mean, scheduler.step(noise, time, x, eta, variance_noise=zero + 1.0).prev_sample - mean


# -- denoising steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "train_steps"), [(2, 20), (5, 100), (10, 10)])
@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_every_step_is_that_of_diffusers(steps: int, train_steps: int, eta: float) -> None:
    """Rows of all steps, noisy or not, together."""
    policy, scheduler = make(steps=steps, train_steps=train_steps, eta=eta), reference(steps, train_steps)
    step, noisy = torch.arange(steps).repeat(2), torch.arange(2).repeat_interleave(steps) == 1
    seen, x = torch.randn(2 * steps, 2), torch.randn(2 * steps, 2)
    times = scheduler.timesteps[step]
    assert times[0] == train_steps - 1
    with torch.no_grad():
        mean, std = policy.transition(seen, x, step, noisy)
        noise = policy.ideas(seen, x, times)[1].double()
        action = policy.ideas(seen, x, times)[0].double()
    for row, time in enumerate(times.tolist()):
        # the noise that goes with the action: of it float32 keeps too little to divide by the signal of the first step
        power = float(scheduler.alphas_cumprod[time])
        exact = (x[row].double() - power**0.5 * action[row]) / (1.0 - power) ** 0.5
        np.testing.assert_allclose(noise[row], exact, atol=2e-6)
        expected = row_step(scheduler, time, exact, x[row].double(), eta if noisy[row] else 0.0)
        np.testing.assert_allclose(mean[row], expected[0], atol=5e-6)
        np.testing.assert_allclose(std[row], expected[1].clamp(min=0.1) if noisy[row] else expected[1], atol=1e-6)


def test_a_deterministic_chunk_is_the_chain_of_diffusers() -> None:
    policy, obs = make(action_size=3), observe(50)
    step, scheduler = policy.act(obs, deterministic=True), reference(5, 100)
    chain, seen = step.trace["chain"], policy.normaliser(obs["policy"])
    assert float(chain[:, 0].std()) == pytest.approx(1.0, abs=0.1)
    for k, time in enumerate(scheduler.timesteps.tolist()):
        with torch.no_grad():
            action, noise = (y.double() for y in policy.ideas(seen, chain[:, k], torch.full((50,), time)))
        found = scheduler.step(noise, time, chain[:, k].double())
        # where noise is nearly all, the action is what is left of float32
        signal = float(scheduler.alphas_cumprod[time]) ** 0.5
        np.testing.assert_allclose(found.pred_original_sample, action, atol=2e-6 / signal)
        np.testing.assert_allclose(chain[:, k + 1], found.prev_sample, atol=2e-6 / signal)
    assert step.action.shape == (50, 2, 3) and torch.equal(step.action.flatten(1), chain[:, -1])
    assert torch.equal(step.log_prob, torch.zeros(50))


class Exact(nn.Module):
    """What is to be added to s x, so that the noise is that of data that is one point: (x - c point) / s."""

    def __init__(self, point: float) -> None:
        super().__init__()
        scheduler = reference(5, 100)
        self.point, self.calls, self.power = point, 0, scheduler.alphas_cumprod[scheduler.timesteps]

    def forward(self, inputs: Tensor) -> Tensor:
        # times are told by sines: count them instead
        power = self.power[self.calls % 5]
        self.calls += 1
        x, c, s = inputs[:, 2:3].double(), power.sqrt(), (1.0 - power).sqrt()
        return (((x - c * self.point) / s - s * x) / c).float()


@pytest.mark.parametrize("deterministic", [True, False])
def test_with_the_noise_of_a_point_a_chain_ends_there(deterministic: bool) -> None:
    """Or as far from it as the floor of the last step's noise, in the fifth of the chains whose last step is noisy."""
    policy, point = make(horizon=1, execute=1), 0.7
    policy.network = Exact(point)
    x, index = torch.randn(4000, 1), torch.randint(5, (4000,))
    generator = None if deterministic else torch.Generator().manual_seed(0)
    off = (denoise(policy.transition, torch.zeros(4000, 2), x, index, 5, generator)[:, -1, 0] - point).double()
    last = (index == 4).numpy() & (not deterministic)
    np.testing.assert_allclose(off[~last], 0.0, atol=2e-4)
    if not deterministic:
        assert stats.kstest(off[last].numpy() / 0.1, "norm").pvalue > 1e-3


# -- likelihood ----------------------------------------------------------------------------------------------------------


def test_the_ratio_is_one_until_weights_change() -> None:
    policy, obs = make(), observe(64)
    step = policy.act(obs)
    assert torch.equal(policy.evaluate(obs, step.trace).log_prob, step.log_prob)
    next(policy.network.parameters()).data.mul_(1.1)
    assert not torch.allclose(policy.evaluate(obs, step.trace).log_prob, step.log_prob, atol=1e-3)


def test_log_probability_is_that_of_the_noisy_step() -> None:
    """Against SciPy's normal density, with diffusers' means and standard deviations; the other steps are without noise."""
    policy, obs, count, scheduler = make(action_size=2, eta=0.7, min_std=0.3), observe(60), 60, reference(5, 100)
    step = policy.act(obs)
    chain, index = step.trace["chain"], step.trace["index"]
    seen, total, floored = policy.normaliser(obs["policy"]), np.zeros(count), 0
    assert set(index.tolist()) == set(range(5))
    for k, time in enumerate(scheduler.timesteps.tolist()):
        x = chain[:, k].double()
        with torch.no_grad():
            action = policy.ideas(seen, chain[:, k], torch.full((count,), time))[0].double()
        power = float(scheduler.alphas_cumprod[time])
        noise = (x - power**0.5 * action) / (1.0 - power) ** 0.5
        on = index == k
        mean, std = row_step(scheduler, time, noise, x, 0.7)
        floored += int((std < 0.3).all())
        density = stats.norm.logpdf(chain[:, k + 1].double(), mean, std.clamp(min=0.3)).sum(1)
        total[on.numpy()] = density[on.numpy()]
        plain = row_step(scheduler, time, noise, x, 0.0)[0]
        np.testing.assert_allclose(chain[:, k + 1][~on], plain[~on], atol=1e-5)
    np.testing.assert_allclose(step.log_prob, total, rtol=1e-4, atol=1e-4)
    assert 1 <= floored < 5


def test_the_noisy_step_is_drawn_for_each_world() -> None:
    index = make().act(observe(4000)).trace["index"]
    assert stats.chisquare(torch.bincount(index, minlength=5).numpy()).pvalue > 1e-3


def test_nobody_is_answered_with_nothing() -> None:
    step = make().act(observe(0))
    assert step.action.shape == (0, 2, 1) and step.log_prob.shape == (0,) and step.trace["chain"].shape == (0, 6, 2)


# -- imitation -----------------------------------------------------------------------------------------------------------


def test_what_lies_behind_the_end_is_not_imitated() -> None:
    policy, obs = make(horizon=4, execute=4, action_size=2), observe(30)
    action, mask = torch.randn(30, 4, 2), torch.arange(4).expand(30, 4) < torch.randint(1, 5, (30, 1))
    losses = []
    for junk in (0.0, 100.0, float("nan")):
        policy.seed(3)
        losses.append(float(policy.imitate(obs, torch.where(mask[..., None], action, junk), mask).detach()))
    assert losses[0] == losses[1] == losses[2] > 0
    policy.seed(3)
    assert float(policy.imitate(obs, action, torch.zeros_like(mask)).detach()) == 0.0


def test_the_loss_of_who_ignores_what_it_sees_is_known() -> None:
    """A network that gives 0 takes s x for the noise: of data of unit variance, its error has the variance c^2."""
    policy, count = make(), 200_000
    for parameter in policy.network.parameters():
        parameter.data.zero_()
    # not the seed of the policy, whose noise would be these numbers
    action = torch.randn(count, 2, 1, generator=torch.Generator().manual_seed(2))
    loss = float(policy.imitate(observe(count), action, torch.ones(count, 2, dtype=torch.bool)).detach())
    assert loss == pytest.approx(float(reference(5, 100).alphas_cumprod.mean()), rel=0.02)


def test_imitation_learns_both_ways_round_an_obstacle_where_a_mean_would_hit_it() -> None:
    """Half of the demonstrations pass left (-0.8), half right (0.8); their mean is 0."""
    generator = torch.Generator().manual_seed(0)
    side = 1.0 - 2.0 * (torch.rand(2000, generator=generator) < 0.5).float()
    action = (0.8 * side[:, None] + 0.05 * torch.randn(2000, 2, generator=generator))[..., None]
    obs, mask = observe(2000), torch.ones(2000, 2, dtype=torch.bool)
    torch.manual_seed(0)
    policy = DiffusionPolicy(DiffusionOptions(**(SMALL | {"hidden": [64, 64], "steps": 10})), {"policy": 2}, 1)
    policy.take_statistics(obs, action.flatten(0, 1))
    optimiser = torch.optim.Adam(policy.parameters(), 3e-3)
    for _ in range(1200):
        pick = torch.randint(2000, (256,), generator=generator)
        loss = policy.imitate({"policy": obs["policy"][pick]}, action[pick], mask[pick])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for deterministic in (True, False):
        chunks = policy.act(observe(1000, seed=7), deterministic=deterministic).action[..., 0]
        near = (chunks.abs() - 0.8).abs() < 0.25
        assert float(near.all(1).float().mean()) > 0.9
        assert 0.4 < float((chunks[:, 0] < 0).float().mean()) < 0.6
        assert bool((chunks[near.all(1)].sign().std(1) == 0).all())  # a chunk keeps to its side


def test_statistics_of_demonstrations_are_kept() -> None:
    policy = make(action_size=2)
    obs, action = observe(300), torch.randn(300, 2) * torch.tensor([0.1, 2.0]) + torch.tensor([0.5, -1.0])
    policy.begin_at(0.9)
    assert policy.action_mean.tolist() == pytest.approx([0.9, 0.9])
    policy.take_statistics(obs, action)
    before = policy.normaliser.shift.clone()
    policy.update_normaliser({"policy": 100 + obs["policy"]}, torch.ones(300, dtype=torch.bool))
    policy.begin_at(0.9)
    assert torch.equal(policy.normaliser.shift, before)
    step = policy.act(obs)
    expected = step.trace["chain"][:, -1].view(300, 2, 2).numpy() * action.numpy().std(0, ddof=1) + action.numpy().mean(0)
    np.testing.assert_allclose(step.action, expected, rtol=1e-4, atol=1e-5)


def test_a_copy_and_a_saved_policy_act_alike() -> None:
    policy, obs = make(), observe(20)
    other = make(obs_size=2)
    torch.nn.init.zeros_(next(other.parameters()))
    other.load_state_dict(policy.state_dict())
    actions = []
    for one in (policy, copy.deepcopy(policy), other):
        one.seed(5)
        actions.append(one.act(obs).action)
    assert torch.equal(actions[0], actions[1]) and torch.equal(actions[0], actions[2])


# -- the rest ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"execute": 3}, "policy.execute=3: expected 1 to policy.horizon=2"),
        ({"horizon": 0}, "policy.horizon=0: expected at least 1"),
        ({"steps": 1}, "policy.steps=1: expected at least 2"),
        ({"steps": 0}, "policy.steps=0: expected at least 2"),
        ({"steps": 8}, "policy.train_steps=100: expected a multiple of policy.steps=8"),
        ({"train_steps": 0}, "policy.train_steps=0: expected a multiple of policy.steps=5"),
        ({"eta": 0.0}, "policy.eta=0.0: expected above 0, at most 1"),
        ({"eta": 1.1}, "policy.eta=1.1: expected above 0, at most 1"),
        ({"min_std": 0.0}, "policy.min_std=0.0: expected above 0, at most 1"),
        ({"activation": "gelu"}, "unknown activation 'gelu'"),
        ({"hidden": [0]}, "every width must be at least 1"),
    ],
)
def test_impossible_options_are_refused(change: dict, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        make(**change)


def test_who_has_another_policy_does_not_wait_for_diffusers() -> None:
    words = "import sys; from embodied.spec.registry import names; assert 'diffusion' in names('policy')"
    ran = subprocess.run([sys.executable, "-c", f"{words}; sys.exit('diffusers' in sys.modules)"], check=False)
    assert ran.returncode == 0


def make_ppo(options: PPOOptions) -> PPO:
    torch.manual_seed(0)
    policy = DiffusionPolicy(DiffusionOptions(**SMALL), SIZES, 2)
    return PPO(options, policy, SIZES, 2, WORLDS, "cpu", 0)


def test_ppo_takes_and_learns_from_its_decisions() -> None:
    ppo = make_ppo(PPOOptions(num_steps=8, critic_hidden=[16], entropy=0.0))
    before = [p.detach().clone() for p in ppo.policy.parameters()]
    collect(ppo, PointMass(), None)
    assert all(np.isfinite(float(x)) for x in ppo.update().values())
    assert not any(torch.equal(a, b) for a, b in zip(before, ppo.policy.parameters(), strict=True))


@pytest.mark.learning
def test_a_diffusion_policy_learns_a_point_mass() -> None:
    """Who stands still where it began loses 0.77 a step."""
    ppo = make_ppo(PPOOptions(num_steps=10, critic_hidden=[32], entropy=0.0, learning_rate=1e-3, desired_kl=0.03))
    env, obs, means = PointMass(), None, []
    for _ in range(120):
        obs = collect(ppo, env, obs)
        means.append(float(ppo.rollout.reward.mean()))
        ppo.update()
    assert np.mean(means[:5]) < -0.6 and np.mean(means[-10:]) > -0.45, (np.mean(means[:5]), np.mean(means[-10:]))
