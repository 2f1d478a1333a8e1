"""A chain too long to be learned from its far end: what reset samplers are for, in seconds.

24 depths, 4 actions of which one is right at each; a wrong one ends the episode, being right down to depth 0 is
rewarded. An episode may start at any depth. Tabular REINFORCE with a running baseline a depth, gradients averaged over
256 episodes, 500 iterations, learning rate 2. Solved from a depth means: a success there is more likely than not,
computed exactly.
"""

from __future__ import annotations

import torch
from sampler_tools import make_slots
from torch.nn.functional import one_hot

from embodied.algos.trainer import single_threaded
from embodied.spec.protocols import Trials

DEPTHS, ACTIONS, EPISODES, ITERATIONS, LEARNING_RATE, HISTORY = 24, 4, 256, 500, 2.0, 20
SEEDS = (0, 1, 2)


class Chain:
    """The policy and where it stands; slots at or beyond DEPTHS, if a bank has such, are starts that always fail."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(1000 + seed)
        self.right = torch.randint(ACTIONS, (DEPTHS,), generator=self.generator)
        self.logits, self.baseline = torch.zeros(DEPTHS, ACTIONS), torch.zeros(DEPTHS)

    def solved(self):
        """Probability of success from each depth."""
        return self.logits.softmax(1)[torch.arange(DEPTHS), self.right].cumprod(0)

    def run(self, starts):
        """One episode from each start, and learning from them: success [M], |advantage| [depth, M] and where it was had."""
        policy, count = self.logits.softmax(1), len(starts)
        actions = torch.multinomial(policy, count, replacement=True, generator=self.generator).T  # [episode, depth]
        below = (torch.arange(DEPTHS) <= starts[:, None]) & (starts < DEPTHS)[:, None]
        # survived[:, d]: no wrong action from the start down to d; reached[:, d]: d was acted in
        survived = ((actions == self.right) | ~below).long().flip(1).cumprod(1).flip(1)
        reached = torch.cat([survived[:, 1:], torch.ones(count, 1)], 1) * below
        success = (survived[:, 0] == 1) & (starts < DEPTHS)
        reward = success.float()
        advantage = reached * (reward[:, None] - self.baseline)
        self.logits += LEARNING_RATE * (advantage[:, :, None] * (one_hot(actions, ACTIONS) - policy)).mean(0)
        visits = reached.sum(0)
        mean = (reached * reward[:, None]).sum(0) / visits.clamp(min=1)
        self.baseline = torch.where(visits > 0, 0.9 * self.baseline + 0.1 * mean, self.baseline)
        return success, advantage.abs().T, reached.bool().T

    def try_slots(self, slots, seed):
        """What a sampler's `evaluate` gives: an episode of the present policy in each slot, nothing learned."""
        chance = torch.cat([self.solved(), torch.zeros(int(slots.max()) + 1)])[slots]
        success = torch.rand(len(slots), generator=torch.Generator().manual_seed(seed)) < chance
        return Trials(success, torch.ones_like(success), DEPTHS * len(slots))


@single_threaded(EPISODES)
def learn(cls, options, seed, shuffled=False, impossible=0, iterations=ITERATIONS):
    """Depths solved, probability of success from the deepest, and the share of draws that went to impossible starts."""
    slots = DEPTHS + impossible
    sampler = cls(options, make_slots(slots, EPISODES, seed=seed))
    chain = Chain(seed)
    if hasattr(sampler, "evaluate"):
        sampler.evaluate = chain.try_slots
    all_valid = torch.ones(EPISODES, dtype=torch.bool)
    wasted = 0.0
    for _ in range(iterations):
        starts = sampler.sample()
        wasted += (starts >= DEPTHS).float().mean().item() / iterations
        success, advantage, reached = chain.run(starts)
        told = success[torch.randperm(EPISODES, generator=chain.generator)] if shuffled else success
        sampler.record(starts, told, all_valid, success.float())
        if hasattr(sampler, "score"):
            sampler.score(torch.where(reached, starts, -1), advantage)
        sampler.end_iteration()
    from_depth = chain.solved()
    return (from_depth > 0.5).sum().item(), from_depth[-1].item(), wasted
