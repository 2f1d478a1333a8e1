"""Diffusion policies: chunks of actions by DDIM (Song et al. 2021, arXiv 2010.02502), through diffusers' scheduler.

With signal c and noise s, c^2 + s^2 = 1, an action a under noise e is x = c a + s e. Time counts training timesteps: 0 is
almost the action, the last is almost noise alone. A denoising step from one to an earlier one goes to a Gaussian about a
weighted sum of what is taken for action and noise (`schedule`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from embodied.policies.denoising import (
    FREQUENCIES,
    Schedule,
    check_options,
    denoise,
    log_density,
    mean_where,
    normalised,
    statistics,
    time_features,
)
from embodied.policies.gaussian import group_size
from embodied.policies.networks import check_mlp, mlp
from embodied.policies.normaliser import RunningNormaliser
from embodied.spec.protocols import Obs, Score, Step
from embodied.spec.registry import register


def schedule(scheduler: Any, steps: int, eta: float, min_std: float) -> Schedule:
    """Denoising steps of DDIM (equation 12), from the last training timestep down to none.

    Args:
        scheduler: diffusers' `DDIMScheduler`.
        steps: K, of which the number of training timesteps is a multiple.
        eta: 0 is DDIM without noise, 1 the variance of DDPM.
        min_std: floor under the standard deviation. As in DPPO (arXiv 2409.00588) it does not change the mean.
    """
    scheduler.set_timesteps(steps)
    time = scheduler.timesteps
    power = scheduler.alphas_cumprod.double()  # of the signal, c^2
    here, left = power[time], torch.cat([power[time[1:]], torch.ones(1, dtype=torch.float64)])
    variance = eta**2 * (1.0 - left) / (1.0 - here) * (1.0 - here / left)
    return Schedule(time, left.sqrt(), (1.0 - left - variance).clamp(min=0.0).sqrt(), variance.sqrt().clamp(min=min_std))


@dataclass
class DiffusionOptions:
    """Chunks of actions by diffusion."""

    hidden: list[int] = field(default_factory=lambda: [256, 256])
    activation: str = "elu"  # elu, relu, silu or tanh
    horizon: int = 8  # H, actions in a chunk
    execute: int = 8  # of them are executed before the next chunk
    steps: int = 5  # K, denoising steps
    train_steps: int = 100  # timesteps of training, a multiple of K
    eta: float = 1.0  # noise of the noisy step: 1 is that of DDPM
    min_std: float = 0.1  # its floor, of a normalised action


@register("policy", "diffusion", DiffusionOptions)
class DiffusionPolicy(nn.Module):
    """A denoiser by multi-layer perceptron over observation, chunk and time, sampled by DDIM.

    Reads the observation group `policy` through its own normaliser. What the chain ends in, times `action_std` plus
    `action_mean`, is the chunk: statistics of demonstrations, if it has seen some. A deterministic action takes K steps with
    eta = 0 from random noise: without noise in its steps, not without chance.

    Else one step, drawn for each world, is noisy, and the decision's log-probability is that step's. DPPO lets all be noisy
    and gives each a ratio of its own; here a decision has one, and the product over all steps would be a ratio of K times as
    many numbers, for K times the work in every gradient step. Any variance keeps DDIM's marginals, so a chain with one
    noisy step still ends in what was learned, but for the floor.

    The trace of an action is its chain, float32 [N, K + 1, H A] from noise to action, and the index of its noisy step, int64
    [N].

    Args:
        options: see `DiffusionOptions`.
        obs_sizes: width of each observation group.
        action_size: A.

    Raises:
        BadInput: no observation group `policy`, or options that make no sense.
    """

    action_mean: Tensor
    action_std: Tensor
    frozen: Tensor
    timesteps: Tensor
    levels: Tensor
    plain: Tensor
    noisy: Tensor

    def __init__(self, options: DiffusionOptions, obs_sizes: Mapping[str, int], action_size: int) -> None:
        super().__init__()
        self.validate(options)
        size = group_size(obs_sizes, "policy")
        # takes seconds, which those who have another policy need not wait
        from diffusers.schedulers.scheduling_ddim import DDIMScheduler

        self.options, self.action_size = options, action_size
        self.horizon, self.execute = options.horizon, options.execute
        self.width = options.horizon * action_size
        self.trace_like = {
            "chain": torch.zeros(options.steps + 1, self.width),
            "index": torch.zeros((), dtype=torch.int64),
        }
        self.normaliser = RunningNormaliser(size)
        inputs = size + self.width + 2 * FREQUENCIES
        self.network = mlp([inputs, *options.hidden, self.width], options.activation, last_gain=0.01)
        self.register_buffer("action_mean", torch.zeros(action_size))
        self.register_buffer("action_std", torch.ones(action_size))
        self.register_buffer("frozen", torch.zeros((), dtype=torch.bool))
        # trailing: the first step is the last timestep, where there is hardly any signal, as in the noise that it begins with
        self.scheduler = DDIMScheduler(
            options.train_steps, beta_schedule="squaredcos_cap_v2", clip_sample=False, timestep_spacing="trailing"
        )
        power = self.scheduler.alphas_cumprod.double()
        self.register_buffer("levels", torch.stack([power, 1.0 - power]).sqrt().float(), persistent=False)
        for name, eta, floor in (("plain", 0.0, 0.0), ("noisy", options.eta, options.min_std)):
            found = schedule(self.scheduler, options.steps, eta, floor)
            self.register_buffer(name, torch.stack(found[1:]).float(), persistent=False)
        self.register_buffer("timesteps", found.time, persistent=False)
        self.seed(0)

    @staticmethod
    def validate(options: DiffusionOptions) -> None:
        """Check the options before anything is built.

        Raises:
            BadInput: see there.
        """
        check_mlp(options.hidden, options.activation)
        steps, trained = options.steps, options.train_steps
        checks: tuple[tuple[str, bool, str], ...] = (
            ("horizon", options.horizon >= 1, "at least 1"),
            ("execute", 1 <= options.execute <= options.horizon, f"1 to policy.horizon={options.horizon}"),
            ("steps", steps >= 2, "at least 2"),
            # else diffusers' steps do not begin where the last one ended
            ("train_steps", trained >= steps and trained % max(steps, 1) == 0, f"a multiple of policy.steps={steps}"),
            ("eta", 0 < options.eta <= 1, "above 0, at most 1"),
            ("min_std", 0 < options.min_std <= 1, "above 0, at most 1"),
        )
        check_options(options, checks)

    @torch.no_grad()
    def begin_at(self, action: float) -> None:
        """Centre the actions of a policy that has seen no demonstrations on that number."""
        if not self.frozen:
            self.action_mean.fill_(action)

    def seed(self, seed: int) -> None:
        """Start the stream of noise anew, on the device where the weights are."""
        self.generator = torch.Generator(self.action_mean.device).manual_seed(seed)

    # -- action and noise --------------------------------------------------------------------------------------------

    def ideas(self, seen: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """What is taken for the action and for the noise [M, H A] in x [M, H A], at training timesteps int64 [M].

        The network adds to s x, which is the noise where there is no signal: its output f gives c f + s x for the noise, so
        c x - s f for the action. Without that the action is a difference divided by c, near 0 in the first step, and must be
        clipped.
        """
        inputs = torch.cat([seen, x, time_features((time + 1.0) / self.options.train_steps)], -1)
        out, (c, s) = self.network(inputs), self.levels[:, time, None]
        return c * x - s * out, c * out + s * x

    def transition(self, seen: Tensor, x: Tensor, step: Tensor, noisy: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [M, H A] of what follows x in denoising step int64 [M], noisy where bool [M]."""
        action, noise = self.ideas(seen, x, self.timesteps[step])
        w_action, w_noise, std = torch.where(noisy, self.noisy[:, step], self.plain[:, step])[..., None]
        return w_action * action + w_noise * noise, std.expand_as(x)

    # -- acting ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, obs: Obs, carry: Any = None, deterministic: bool = False) -> Step:
        """A chunk [N, H, A], not clipped, its log-probability [N] (0 if `deterministic`), and its trace."""
        seen = self.normaliser(obs["policy"])
        count, steps, device = len(seen), self.options.steps, seen.device
        x = torch.randn(count, self.width, generator=self.generator, device=device)
        index = torch.randint(steps, (count,), generator=self.generator, device=device)
        chain = denoise(self.transition, seen, x, index, steps, None if deterministic else self.generator)
        trace = {"chain": chain, "index": index}
        log_prob = torch.zeros(count, device=device) if deterministic else self._log_prob(seen, **trace)
        chunk = chain[:, -1].view(count, self.horizon, self.action_size)
        return Step(self.action_mean + self.action_std * chunk, log_prob, trace, carry)

    def evaluate(self, obs: Obs, trace: Mapping[str, Tensor], carry: Any = None, starts: Tensor | None = None) -> Score:
        """Log-probability [N] of the noisy step of `trace`; entropy [N] is 0, for it depends on no weights."""
        log_prob = self._log_prob(self.normaliser(obs["policy"]), trace["chain"], trace["index"])
        return Score(log_prob, torch.zeros_like(log_prob), {})

    def _log_prob(self, seen: Tensor, chain: Tensor, index: Tensor) -> Tensor:
        rows = torch.arange(len(chain), device=chain.device)
        mean, std = self.transition(seen, chain[rows, index], index, torch.ones_like(index, dtype=torch.bool))
        return log_density(chain[rows, index + 1], mean, std).sum(1)

    # -- imitating ---------------------------------------------------------------------------------------------------

    def imitate(self, obs: Obs, action: Tensor, mask: Tensor) -> Tensor:
        """Loss of DDPM (Ho et al. 2020, equation 14): mean squared error of the noise, at timesteps drawn uniformly.

        Args:
            obs: of M moments.
            action: what was done from then on [M, H, A].
            mask: bool [M, H], false behind the end of an episode, where actions may hold anything.
        """
        clean, kept = normalised(action, mask, self.action_mean, self.action_std)
        noise = torch.randn(clean.shape, generator=self.generator, device=clean.device)
        time = torch.randint(self.options.train_steps, (len(clean),), generator=self.generator, device=clean.device)
        x = self.scheduler.add_noise(clean, noise, time)
        return mean_where(kept, (self.ideas(self.normaliser(obs["policy"]), x, time)[1] - noise).square())

    @torch.no_grad()
    def take_statistics(self, obs: Obs, action: Tensor) -> None:
        """Normalise by demonstrations from now on, also under RL: observations of M moments, actions [L, A]."""
        seen = obs["policy"]
        self.normaliser.update(seen, torch.ones(len(seen), dtype=torch.bool, device=seen.device))
        mean, std = statistics(action)
        self.action_mean.copy_(mean)
        self.action_std.copy_(std)
        self.frozen.fill_(True)

    def update_normaliser(self, obs: Obs, mask: Tensor) -> None:
        """Take in the observations [M, D] where mask bool [M], unless there are statistics of demonstrations; every rank must
        call it.
        """
        if not self.frozen:
            self.normaliser.update(obs["policy"], mask)
