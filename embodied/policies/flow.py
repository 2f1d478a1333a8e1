"""Flow-matching policies: chunks of actions by a few denoising steps, and how likely the steps were.

Convention, as in openpi and LeRobot: time 1 is noise e, time 0 the action a, x_t = t e + (1 - t) a, and the velocity is e - a.
A network gives it; of what it gives, x_t - t v is its idea of the action and x_t + (1 - t) v that of the noise. A denoising
step from t to t - d, d = 1 / K, goes to a Gaussian about a weighted sum of the two (`schedule`).
"""

from __future__ import annotations

import math
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
from embodied.spec.errors import BadInput, nearest
from embodied.spec.protocols import Obs, Score, Step
from embodied.spec.registry import register

METHODS = ("sde", "cps", "noise")


def schedule(method: str, steps: int, level: float) -> Schedule:
    """Denoising steps from time 1 to 0.

    Args:
        method: `ode` (Euler, no noise), `sde` (Flow-SDE, pi_RL, arXiv 2510.25889: a stochastic step that keeps the marginals
            as steps become small), `cps` (coefficients-preserving sampling, arXiv 2509.05952: keeps them at any step), or
            `noise` (Flow-Noise: the Euler step, whose noise a network decides).
        steps: K.
        level: a, how much noise.
    """
    d = 1.0 / steps
    time = torch.arange(steps, 0, -1, dtype=torch.float64) * d
    left = time - d
    action, noise, std = 1.0 - left, left.clone(), torch.zeros_like(time)
    if method == "sde":
        # at time 1 the second time stands in the denominator, which would be 0
        sigma = level * (time / (1.0 - time.clamp(max=1.0 - d))).sqrt()
        noise = left - sigma.square() * d / (2.0 * time)
        std = sigma * math.sqrt(d)
    elif method == "cps":
        noise, std = left * math.cos(math.pi * level / 2.0), left * math.sin(math.pi * level / 2.0)
    return Schedule(*(x.float() for x in (time, action, noise, std)))


@dataclass
class FlowOptions:
    """Chunks of actions by flow matching."""

    hidden: list[int] = field(default_factory=lambda: [256, 256])
    activation: str = "elu"  # elu, relu, silu or tanh
    horizon: int = 8  # H, actions in a chunk
    execute: int = 8  # of them are executed before the next chunk
    steps: int = 4  # K, denoising steps
    method: str = "sde"  # sde: one step, drawn at random, is noisy; cps: likewise; noise: all are
    noise: float = 0.5  # how much, of sde and cps
    noise_std: list[float] = field(default_factory=lambda: [0.08, 0.16])  # between which the network of `noise` chooses
    shared_index: bool = False  # the noisy step is the same in all worlds
    mean_log_prob: bool = False  # log-probabilities are means over the numbers of a chunk, not sums


@register("policy", "flow", FlowOptions)
class FlowPolicy(nn.Module):
    """A velocity field by multi-layer perceptron over observation, chunk and time.

    Reads the observation group `policy` through its own normaliser. What the chain ends in, times `action_std` plus
    `action_mean`, is the chunk: statistics of demonstrations, if it has seen some. A deterministic action follows the ordinary
    differential equation from random noise: without noise in its steps, not without chance.

    The trace of an action is its chain, float32 [N, K + 1, H A] from noise to action, and the index of its noisy step, int64
    [N]; -1 where all are noisy.

    Args:
        options: see `FlowOptions`.
        obs_sizes: width of each observation group.
        action_size: A.

    Raises:
        BadInput: no observation group `policy`, or options that make no sense.
    """

    action_mean: Tensor
    action_std: Tensor
    frozen: Tensor
    ode: Tensor
    noisy: Tensor

    def __init__(self, options: FlowOptions, obs_sizes: Mapping[str, int], action_size: int) -> None:
        super().__init__()
        self.validate(options)
        size = group_size(obs_sizes, "policy")
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
        if options.method == "noise":
            self.noise_network = mlp([inputs, *options.hidden[:1], self.width], options.activation, last_gain=0.01)
        self.register_buffer("action_mean", torch.zeros(action_size))
        self.register_buffer("action_std", torch.ones(action_size))
        self.register_buffer("frozen", torch.zeros((), dtype=torch.bool))
        for name, method in (("ode", "ode"), ("noisy", options.method)):
            self.register_buffer(name, torch.stack(schedule(method, options.steps, options.noise)), persistent=False)
        # the last step of cps has no noise left
        self.choices = options.steps - 1 if options.method == "cps" else options.steps
        self.seed(0)

    @staticmethod
    def validate(options: FlowOptions) -> None:
        """Check the options before anything is built.

        Raises:
            BadInput: see there.
        """
        check_mlp(options.hidden, options.activation)
        if options.method not in METHODS:
            raise BadInput(f"policy.method={options.method}: {nearest(options.method, METHODS)}")
        low_high = options.noise_std
        checks: tuple[tuple[str, bool, str], ...] = (
            ("horizon", options.horizon >= 1, "at least 1"),
            ("execute", 1 <= options.execute <= options.horizon, f"1 to policy.horizon={options.horizon}"),
            ("steps", options.steps >= 2, "at least 2"),
            ("noise", 0 < options.noise <= (1.0 if options.method == "cps" else 10.0), "above 0, at most 1 for cps, else 10"),
            ("noise_std", len(low_high) == 2 and 0 < low_high[0] < low_high[1], "[low, high] with 0 < low < high"),
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

    # -- the velocity ------------------------------------------------------------------------------------------------

    def inputs(self, seen: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """What the networks get, of normalised observations [M, D], x_t [M, H A] and times [M]."""
        return torch.cat([seen, x, time_features(time)], -1)

    def velocity(self, seen: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Of the chain [M, H A]; see `inputs`."""
        return self.network(self.inputs(seen, x, time))

    def transition(self, seen: Tensor, x: Tensor, step: Tensor, noisy: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [M, H A] of what follows x in denoising step int64 [M], noisy where bool [M]."""
        time = self.ode[0][step]
        inputs = self.inputs(seen, x, time)
        v, at = self.network(inputs), time[:, None]
        # of a time, action, noise and standard deviation, as in `Schedule`
        _, w_action, w_noise, std = torch.where(noisy, self.noisy[:, step], self.ode[:, step])[..., None].unbind()
        mean = w_action * (x - at * v) + w_noise * (x + (1.0 - at) * v)
        if self.options.method != "noise":
            return mean, std.expand_as(mean)
        low, high = (math.log(bound) for bound in self.options.noise_std)
        chosen = (low + (high - low) * 0.5 * (1.0 + torch.tanh(self.noise_network(inputs)))).exp()
        return mean, torch.where(noisy[:, None], chosen, 0.0)

    # -- acting ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, obs: Obs, carry: Any = None, deterministic: bool = False) -> Step:
        """A chunk [N, H, A], not clipped, its log-probability [N] (0 if `deterministic`), and its trace."""
        seen = self.normaliser(obs["policy"])
        count, device = len(seen), seen.device
        x = torch.randn(count, self.width, generator=self.generator, device=device)
        index = self._draw_index(count)
        chain = denoise(self.transition, seen, x, index, self.options.steps, None if deterministic else self.generator)
        trace = {"chain": chain, "index": index}
        log_prob = torch.zeros(count, device=device) if deterministic else self._log_prob(seen, **trace)
        chunk = chain[:, -1].view(count, self.horizon, self.action_size)
        return Step(self.action_mean + self.action_std * chunk, log_prob, trace, carry)

    def chunk(self, obs: Obs, noise: Tensor) -> Tensor:
        """The chunk [N, H, A] at the end of the chain that has no noise in its steps, from `noise` [N, H A]."""
        seen, index = self.normaliser(obs["policy"]), torch.zeros_like(noise[:, 0], dtype=torch.int64)
        chain = denoise(self.transition, seen, noise, index, self.options.steps, None)
        return self.action_mean + self.action_std * chain[:, -1].unflatten(1, (self.horizon, self.action_size))

    def _draw_index(self, count: int) -> Tensor:
        device = self.action_mean.device
        if self.options.method == "noise":
            return torch.full((count,), -1, device=device)
        drawn = torch.randint(
            self.choices, (1 if self.options.shared_index else count,), generator=self.generator, device=device
        )
        return drawn.expand(count).contiguous()

    def evaluate(self, obs: Obs, trace: Mapping[str, Tensor], carry: Any = None, starts: Tensor | None = None) -> Score:
        """Log-probability [N] of the noisy steps of `trace`; entropy [N] is 0, for it depends on no weights but those of
        `noise`.
        """
        log_prob = self._log_prob(self.normaliser(obs["policy"]), trace["chain"], trace["index"])
        return Score(log_prob, torch.zeros_like(log_prob), {})

    def _log_prob(self, seen: Tensor, chain: Tensor, index: Tensor) -> Tensor:
        count, steps = len(chain), self.options.steps
        if self.options.method == "noise":
            step = torch.arange(steps, device=chain.device).repeat(count)
            before, after = chain[:, :-1].flatten(0, 1), chain[:, 1:].flatten(0, 1)
            seen = seen.repeat_interleave(steps, 0)
        else:
            rows, step = torch.arange(count, device=chain.device), index
            before, after = chain[rows, index], chain[rows, index + 1]
        mean, std = self.transition(seen, before, step, torch.ones_like(step, dtype=torch.bool))
        terms = log_density(after, mean, std).reshape(count, self.width * (steps if self.options.method == "noise" else 1))
        return terms.mean(1) if self.options.mean_log_prob else terms.sum(1)

    # -- imitating ---------------------------------------------------------------------------------------------------

    def imitate(self, obs: Obs, action: Tensor, mask: Tensor) -> Tensor:
        """Flow-matching loss (Lipman et al. 2023, equation 9; time is uniform): mean squared error of the velocity.

        Args:
            obs: of M moments.
            action: what was done from then on [M, H, A].
            mask: bool [M, H], false behind the end of an episode, where actions may hold anything.
        """
        count = len(action)
        clean, kept = normalised(action, mask, self.action_mean, self.action_std)
        noise = torch.randn(clean.shape, generator=self.generator, device=clean.device)
        time = torch.rand(count, generator=self.generator, device=clean.device)
        x = time[:, None] * noise + (1.0 - time[:, None]) * clean
        error = (self.velocity(self.normaliser(obs["policy"]), x, time) - (noise - clean)).square()
        return mean_where(kept, error)

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
