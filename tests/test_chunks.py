"""Chunks of actions: advantages against brute force, each world's own pace, and learning from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ppo import SIZES, WORLDS, PointMass, collect, same, weights
from torch import Tensor

from embodied.algos.chunks import ChunkQueue
from embodied.algos.ppo import PPO, PPOOptions
from embodied.algos.returns import chunk_gae, gae
from embodied.policies.flow import FlowOptions, FlowPolicy
from embodied.spec.errors import BadInput
from embodied.spec.protocols import Step

GAMMA, LAM = 0.9, 0.8

# -- advantages ----------------------------------------------------------------------------------------------------------


def storage(seed: int, steps: int = 12, worlds: int = 5) -> dict[str, Tensor]:
    """Random steps: episodes end here and there, decisions at every beginning and wherever else."""
    generator = torch.Generator().manual_seed(seed)

    def flip(share: float) -> Tensor:
        return torch.rand(steps, worlds, generator=generator) < share

    ended = flip(0.2)
    decided = flip(0.4)
    decided[0] = True
    decided[1:] |= ended[:-1]
    floats = {name: torch.randn(steps, worlds, generator=generator) for name in ("reward", "value", "next_value")}
    return floats | {"terminated": ended & flip(0.5), "ended": ended, "decided": decided, "valid": ~flip(0.05)}


def by_hand(found: dict[str, Tensor], world: int) -> dict[int, float]:
    """Advantage of each valid chunk, by plain recursion over the list of chunks."""
    s = {name: x[:, world].tolist() for name, x in found.items()}
    starts = [t for t, decided in enumerate(s["decided"]) if decided]
    chunks, steps = [], len(s["reward"])
    for start, following in zip(starts, [*starts[1:], steps], strict=True):
        end = next((t for t in range(start, following) if s["ended"][t]), following - 1)
        chunks.append((start, end))
    advantage: dict[int, float] = {}
    later = 0.0
    for start, end in reversed(chunks):
        k = end - start + 1
        gain = sum(GAMMA**i * s["reward"][start + i] for i in range(k))
        follows = 0.0 if s["terminated"][end] else s["next_value"][end]
        continues = not s["ended"][end] and end < steps - 1
        here = gain + GAMMA**k * follows - s["value"][start] + (LAM * GAMMA**k * later if continues else 0.0)
        good = all(s["valid"][start : end + 1])
        if good:
            advantage[start] = here
        later = here if good else 0.0
    return advantage


@settings(max_examples=200)
@given(seed=st.integers(0, 2**31))
def test_advantages_of_chunks_are_those_of_plain_recursion(seed: int) -> None:
    found = storage(seed)
    advantage, valid = chunk_gae(**found, gamma=GAMMA, lam=LAM)
    for world in range(5):
        expected = by_hand(found, world)
        assert torch.nonzero(valid[:, world])[:, 0].tolist() == sorted(expected)
        for t in range(12):
            assert float(advantage[t, world]) == pytest.approx(expected.get(t, 0.0), abs=1e-4)


def test_with_every_step_decided_it_is_the_ordinary_estimate() -> None:
    found = storage(3)
    found["decided"] = torch.ones_like(found["decided"])
    found["ended"] |= ~found["valid"]
    advantage, valid = chunk_gae(**found, gamma=GAMMA, lam=LAM)
    assert torch.equal(valid, found["valid"])
    del found["decided"]
    torch.testing.assert_close(advantage, gae(**found, gamma=GAMMA, lam=LAM))


# -- the queue -----------------------------------------------------------------------------------------------------------


class Counter:
    """Plans count up from 100 times the number of plans made so far: what is executed tells of which plan it is."""

    horizon, execute = 4, 3

    def __init__(self) -> None:
        self.plans = 0

    def act(self, obs: dict[str, Tensor], carry=None, deterministic: bool = False) -> Step:
        count = len(obs["policy"])
        plan = 100.0 * (self.plans + 1 + torch.arange(count)).view(-1, 1, 1) + torch.arange(4.0).view(1, -1, 1)
        self.plans += count
        return Step(plan, torch.zeros(count), {"plan": plan[:, :, 0]})


def test_each_world_executes_its_own_chunks_and_is_asked_only_where_one_is_due() -> None:
    queue = ChunkQueue(Counter(), 2, 1, torch.device("cpu"))
    obs, done = {"policy": torch.zeros(2, 1)}, []
    for step in range(6):
        decision = queue.next(obs)
        done.append((decision.action[:, 0].tolist(), decision.due.tolist(), decision.ids.tolist()))
        queue.cut(torch.tensor([False, step == 1]))  # an episode ends in the second world's second step
    assert done == [
        ([100, 200], [True, True], [0, 1]),
        ([101, 201], [False, False], []),
        ([102, 300], [False, True], [1]),
        ([400, 301], [True, False], [0]),
        ([401, 302], [False, False], []),
        ([402, 500], [False, True], [1]),
    ]


def test_a_saved_queue_goes_on_where_it_was() -> None:
    obs, device = {"policy": torch.zeros(3, 1)}, torch.device("cpu")
    queue = ChunkQueue(Counter(), 3, 1, device)
    queue.next(obs), queue.cut(torch.tensor([True, False, False])), queue.next(obs)
    other = ChunkQueue(Counter(), 3, 1, device)
    other.load_state_dict(queue.state_dict())
    other.policy.plans = queue.policy.plans
    for _ in range(5):
        assert torch.equal(queue.next(obs).action, other.next(obs).action)
    queue.clear()
    assert bool(queue.next(obs).due.all())


# -- learning ------------------------------------------------------------------------------------------------------------

OPTIONS = PPOOptions(num_steps=8, critic_hidden=[16], entropy=0.0)


def make_ppo(options: PPOOptions = OPTIONS, seed: int = 0, **changes) -> PPO:
    torch.manual_seed(seed)
    flow = FlowOptions(**({"hidden": [32, 32], "horizon": 4, "execute": 3} | changes))
    return PPO(options, FlowPolicy(flow, SIZES, 2), SIZES, 2, WORLDS, "cpu", seed)


def test_what_is_stored_is_what_was_decided_and_its_ratio_is_one() -> None:
    ppo, env, obs = make_ppo(), PointMass(), None
    for _ in range(2):
        obs = collect(ppo, env, obs)
        stored = ppo.rollout
        assert bool(stored.decided[0].all())  # an update forgets what was planned
        for world in range(WORLDS):
            executed = 0
            for t in range(8):
                due = t == 0 or executed == 3 or bool(stored.ended[t - 1, world])
                executed = 1 if due else executed + 1
                assert bool(stored.decided[t, world]) == due
        kept = stored.decided.flatten()
        trace = {name: x.flatten(0, 1)[kept] for name, x in stored.trace.items()}
        score = ppo.policy.evaluate({"policy": stored.obs["policy"].flatten(0, 1)[kept]}, trace)
        torch.testing.assert_close(score.log_prob, stored.log_prob.flatten()[kept], atol=1e-4, rtol=1e-5)
        metrics = ppo.update()
        assert all(np.isfinite(float(x)) for x in metrics.values())


@pytest.mark.parametrize("method", ["sde", "cps", "noise"])
def test_saved_in_the_middle_of_a_chunk_it_continues_bit_for_bit(method: str, tmp_path) -> None:
    ppo, env = make_ppo(method=method), PointMass()
    obs = collect(ppo, env, steps=4)
    torch.save(ppo.state_dict(), tmp_path / "state.pt")
    other = make_ppo(seed=1, method=method)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    ends = []
    for learner in (ppo, other):
        twin = PointMass()
        twin.x, twin.steps = env.x.clone(), env.steps.clone()
        twin.generator.set_state(env.generator.get_state())
        collect(learner, twin, obs, steps=4)
        learner.update()
        ends.append(weights(learner))
    assert same(*ends)


def test_the_critic_warms_up_alone() -> None:
    ppo, env, obs = make_ppo(PPOOptions(num_steps=8, critic_hidden=[16], critic_warmup=2)), PointMass(), None
    first, rate = [x.clone() for x in ppo.policy.state_dict().values()], float(ppo.surrogate.learning_rate)
    for update in range(3):
        critic = [p.detach().clone() for p in ppo.critic.parameters()]
        obs = collect(ppo, env, obs)
        ppo.update()
        moved = [not torch.equal(a, b) for a, b in zip(ppo.policy.parameters(), _like(first, ppo), strict=True)]
        assert not same(critic, [p.detach() for p in ppo.critic.parameters()])
        assert any(moved) == (update == 2)
        if update < 2:
            assert float(ppo.surrogate.learning_rate) == rate


def _like(saved: list[Tensor], ppo: PPO) -> list[Tensor]:
    names = [name for name, _ in ppo.policy.named_parameters()]
    return [x for name, x in zip(ppo.policy.state_dict(), saved, strict=True) if name in names]


def test_chunks_are_not_mirrored() -> None:
    mirror = {name: (torch.tensor([0, 1]), torch.ones(2)) for name in ("policy", "critic", "action")}
    policy = FlowPolicy(FlowOptions(), SIZES, 2)
    with pytest.raises(BadInput, match="a policy of chunks is not mirrored"):
        PPO(PPOOptions(symmetry=True), policy, SIZES, 2, WORLDS, "cpu", 0, mirror)


@pytest.mark.learning
@pytest.mark.parametrize("method", ["sde", "cps", "noise"])
def test_a_flow_policy_learns_a_point_mass(method: str) -> None:
    """Who stands still where it began loses 0.77 a step."""
    options = PPOOptions(num_steps=10, critic_hidden=[32], entropy=0.0, learning_rate=1e-3, desired_kl=0.03)
    ppo, env, obs = make_ppo(options, method=method, horizon=2, execute=2, noise_std=[0.2, 0.4]), PointMass(), None
    means = []
    for _ in range(120):
        obs = collect(ppo, env, obs)
        means.append(float(ppo.rollout.reward.mean()))
        ppo.update()
    assert np.mean(means[:5]) < -0.6 and np.mean(means[-10:]) > -0.45


def test_a_minibatch_is_counted_in_chunks() -> None:
    ppo = make_ppo(PPOOptions(num_steps=8, critic_hidden=[16], epochs=1, minibatch_size=12))
    collect(ppo, PointMass())
    decisions, seen, learn = int(ppo.rollout.decided.sum()), [], ppo.surrogate._learn

    def spy(batch, index, threads):
        seen.append(len(index))
        return learn(batch, index, threads)

    ppo.surrogate._learn = spy
    ppo.update()
    assert decisions < 8 * WORLDS and sum(seen) == decisions and max(seen) <= 12 and len(seen) == -(-decisions // 12)
