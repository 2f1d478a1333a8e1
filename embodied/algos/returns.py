"""Returns and advantages: pure functions over [T, N] tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.spec.ranks import sum_over_ranks


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ended: Tensor,
    gamma: float,
    lam: float,
    valid: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimates [T, N] (Schulman et al. 2016, equations 11 and 16).

    The return that a critic should learn is `gae(...) + value`.

    Args:
        reward: of each step [T, N].
        value: V of the observation acted on [T, N].
        next_value: V of the observation that the step led to, before any reset [T, N]. A truncated episode is
            bootstrapped from it; at a terminated one it may hold anything.
        terminated: bool [T, N], the episode is over and worth nothing more.
        ended: bool [T, N], nothing after this step belongs to its episode (terminated, truncated or invalid).
        gamma: discount a step.
        lam: weight of longer returns; 0 is one-step, 1 is Monte Carlo.
        valid: bool [T, N]; elsewhere the advantage is 0 and the inputs may hold anything. None: everywhere.
    """
    advantage = reward + gamma * torch.where(terminated, 0.0, next_value) - value
    if valid is not None:
        advantage = torch.where(valid, advantage, 0.0)
    weight = torch.where(ended, 0.0, gamma * lam)
    for t in range(len(reward) - 2, -1, -1):
        advantage[t].addcmul_(weight[t], advantage[t + 1])
    return advantage


def chunk_gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ended: Tensor,
    decided: Tensor,
    gamma: float,
    lam: float,
    valid: Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates over chunks of steps, each worth what its executed steps give.

    A chunk goes from where it was decided to the step before the next decision, the end of the episode or of the storage,
    whatever comes first; with k steps its reward is their discounted sum, and what follows is discounted by gamma^k. The first
    step of an episode, and of the storage, must be decided. With every step decided it is `gae`.

    Args:
        reward: of each step [T, N].
        value: V of the observation acted on [T, N].
        next_value: as for `gae` [T, N].
        terminated: bool [T, N], as for `gae`.
        ended: bool [T, N], as for `gae`.
        decided: bool [T, N], a chunk begins.
        gamma: discount a step.
        lam: weight of longer returns, a chunk.
        valid: bool [T, N]; a chunk with a step that is not is not either.

    Returns:
        The advantage [T, N], 0 where nothing was decided or the chunk is not valid; and bool [T, N], a valid chunk was decided.
    """
    last = torch.ones_like(ended)
    last[:-1] = ended[:-1] | decided[1:]
    left = gamma * torch.where(terminated, 0.0, next_value)
    gain, discount, whole = reward.clone(), torch.full_like(reward, gamma), valid.clone()
    advantage, after = torch.zeros_like(reward), torch.zeros_like(reward)
    for t in range(len(reward) - 1, -1, -1):
        if t == len(reward) - 1:
            gain[t] += left[t]
        else:
            gain[t] += torch.where(last[t], left[t], gamma * gain[t + 1])
            discount[t] *= torch.where(last[t], 1.0, discount[t + 1])
            whole[t] &= last[t] | whole[t + 1]
            after[t] = torch.where(last[t], torch.where(ended[t], 0.0, advantage[t + 1]), after[t + 1])
        here = gain[t] - value[t] + lam * discount[t] * after[t]
        advantage[t] = torch.where(decided[t] & whole[t], here, 0.0)
    return advantage, decided & whole


def normalise(advantage: Tensor, valid: Tensor) -> Tensor:
    """Advantages of mean 0 and standard deviation 1 over the valid ones of all ranks; 0 where not valid.

    Args:
        advantage: [T, N].
        valid: bool [T, N].
    """
    kept = torch.where(valid, advantage, 0.0)
    count = sum_over_ranks(valid.sum()).clamp(min=1)
    mean = sum_over_ranks(kept.sum()) / count
    kept = torch.where(valid, advantage - mean, 0.0)
    std = (sum_over_ranks(kept.square().sum()) / count).sqrt()
    return kept / (std + 1e-8)


def explained_variance(value: Tensor, returns: Tensor, valid: Tensor) -> Tensor:
    """1 - Var(returns - value) / Var(returns) over the valid entries: 1 is a perfect critic, 0 a constant one."""
    count = valid.sum().clamp(min=1)

    def variance(x: Tensor) -> Tensor:
        mean = torch.where(valid, x, 0.0).sum() / count
        return torch.where(valid, x - mean, 0.0).square().sum() / count

    return 1 - variance(returns - value) / variance(returns).clamp(min=1e-8)


def group_advantage(
    outcome: Tensor, ended: Tensor, valid: Tensor, latest: int, group: int, keep: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages of whole episodes over those of their group: (outcome - mean) / standard deviation (arXiv 2402.03300).

    Args:
        outcome: of an episode, at its last step [T, N].
        ended: bool [T, N], an episode's last step; the first step begins one in every world.
        valid: bool [T, N]; a step that is not ends its episode, which counts nothing, for itself and for its group.
        latest: episodes that began after this step count nothing.
        group: worlds of a group, neighbours.
        keep: groups whose mean outcome lies in these bounds count, and vary.

    Returns:
        The advantage [T, N] of each step's episode, 0 where it does not count; bool [T, N], it counts; the share of groups
        that do.
    """
    result, whole = torch.zeros_like(outcome), torch.zeros_like(ended)
    last, good = torch.zeros_like(outcome[0]), torch.zeros_like(ended[0])
    for t in range(len(ended) - 1, -1, -1):
        last = torch.where(ended[t], outcome[t], last)
        good = torch.where(ended[t], valid[t], good)
        result[t], whole[t] = last, good
    begins = torch.ones_like(ended)
    begins[1:] = ended[:-1]
    index = torch.arange(len(ended), device=ended.device)[:, None]
    began = torch.where(begins, index, 0).cummax(0).values
    counted = whole & (began <= latest)

    def of_groups(x: Tensor) -> Tensor:
        """Sums over the episodes of a group [worlds / group]."""
        return torch.where(begins & counted, x, 0.0).sum(0).view(-1, group).sum(1)

    episodes = of_groups(torch.ones_like(result))
    mean = of_groups(result) / episodes.clamp(min=1)
    variance = of_groups(result.square()) / episodes.clamp(min=1) - mean.square()
    low, high = keep
    kept = (mean >= low) & (mean <= high) & (variance > 1e-6)
    mean, std, every = (x.repeat_interleave(group) for x in (mean, variance.clamp(min=1e-6).sqrt(), kept))
    counted = counted & every
    return torch.where(counted, (result - mean) / std, 0.0), counted, kept.float().mean()
