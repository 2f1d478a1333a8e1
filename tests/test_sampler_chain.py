"""What success-guided resets are for, in seconds: a chain too long to be learned from its far end.

24 depths, 4 actions of which one is right at each; a wrong one ends the episode, being right down to depth 0 is
rewarded. An episode may start at any depth. Tabular REINFORCE with a running baseline a depth, gradients averaged over
256 episodes, 500 iterations, learning rate 2. Solved from a depth means: a success there is more likely than not,
computed exactly.
"""

import pytest
import torch
from torch.nn.functional import one_hot

from embodied.sim.samplers.success_guided import PRESETS, SuccessGuided, SuccessGuidedOptions
from embodied.sim.samplers.uniform import Uniform, UniformOptions

DEPTHS, ACTIONS, EPISODES, ITERATIONS, LEARNING_RATE, HISTORY = 24, 4, 256, 500, 2.0, 20
SEEDS = (0, 1, 2)


def learn(cls, options, seed, shuffled=False):
    """Depths solved and probability of success from the deepest, after learning."""
    sampler = cls(options, EPISODES, DEPTHS, torch.zeros(DEPTHS, dtype=torch.int64), ["chain"], "chain", seed, "cpu")
    generator = torch.Generator().manual_seed(1000 + seed)
    right = torch.randint(ACTIONS, (DEPTHS,), generator=generator)
    logits, baseline = torch.zeros(DEPTHS, ACTIONS), torch.zeros(DEPTHS)
    all_valid = torch.ones(EPISODES, dtype=torch.bool)
    for _ in range(ITERATIONS):
        starts = sampler.sample()
        policy = logits.softmax(1)
        actions = torch.multinomial(policy, EPISODES, replacement=True, generator=generator).T  # [episode, depth]
        below = torch.arange(DEPTHS) <= starts[:, None]
        # survived[:, d]: no wrong action from the start down to d; reached[:, d]: d was acted in
        survived = ((actions == right) | ~below).long().flip(1).cumprod(1).flip(1)
        reached = torch.cat([survived[:, 1:], torch.ones(EPISODES, 1)], 1) * below
        success = survived[:, 0] == 1
        reward = success.float()
        advantage = reached * (reward[:, None] - baseline)
        logits += LEARNING_RATE * (advantage[:, :, None] * (one_hot(actions, ACTIONS) - policy)).mean(0)
        visits = reached.sum(0)
        mean = (reached * reward[:, None]).sum(0) / visits.clamp(min=1)
        baseline = torch.where(visits > 0, 0.9 * baseline + 0.1 * mean, baseline)
        told = success[torch.randperm(EPISODES, generator=generator)] if shuffled else success
        sampler.record(starts, told, all_valid, reward)
    from_depth = logits.softmax(1)[torch.arange(DEPTHS), right].cumprod(0)
    return (from_depth > 0.5).sum().item(), from_depth[-1].item()


def guided(preset):
    return SuccessGuidedOptions(**{**PRESETS[preset], "history": HISTORY})


@pytest.fixture(scope="module")
def uniform():
    return [learn(Uniform, UniformOptions(history=HISTORY), seed) for seed in SEEDS]


def test_uniform_resets_do_not_reach_the_far_end(uniform):
    assert all(7 <= solved <= 15 and deepest < 0.01 for solved, deepest in uniform), uniform


def test_success_guided_resets_with_the_locomotion_preset_solve_the_whole_chain():
    results = [learn(SuccessGuided, guided("locomotion"), seed) for seed in SEEDS]
    assert all(solved == DEPTHS and deepest > 0.85 for solved, deepest in results), results


def test_the_manipulation_preset_is_between(uniform):
    results = [learn(SuccessGuided, guided("manipulation"), seed) for seed in SEEDS]
    assert all(solved >= 20 and 0.02 < deepest < 0.5 for solved, deepest in results), results
    assert min(solved for solved, _ in results) > max(solved for solved, _ in uniform)


def test_shuffled_outcomes_lose_the_gain():
    # the same outcomes, credited to other starts: whatever else differs from uniform resets is not what helps
    results = [learn(SuccessGuided, guided("locomotion"), seed, shuffled=True) for seed in SEEDS]
    assert all(solved <= 18 and deepest < 0.01 for solved, deepest in results), results
