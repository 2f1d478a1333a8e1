import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from embodied.algos.ppo import PPO, PPOOptions
from embodied.policies.gaussian import GaussianPolicy, MLPOptions
from embodied.spec.errors import BadInput, Fault

SIZES = {"policy": 2, "critic": 3}
WORLDS = 16
SMALL = PPOOptions(num_steps=6, critic_hidden=[16])


def make_ppo(options=SMALL, sizes=SIZES, action_size=2, worlds=WORLDS, seed=0):
    torch.manual_seed(seed)
    policy = GaussianPolicy(MLPOptions(hidden=[16]), sizes, action_size)
    return PPO(options, policy, sizes, action_size, worlds, "cpu", seed)


class PointMass:
    """Position x is moved by the action; reward is -|x|; an episode is cut after 10 steps. Worlds may be invalid."""

    def __init__(self, worlds=WORLDS, seed=0, invalid_share=0.0):
        self.generator = torch.Generator().manual_seed(seed)
        self.invalid_share = invalid_share
        self.x = self.start(worlds)
        self.steps = torch.randint(0, 10, (worlds,), generator=self.generator)

    def start(self, worlds):
        return 2 * torch.rand(worlds, 2, generator=self.generator) - 1

    def obs(self, x):
        return {"policy": x.clone(), "critic": torch.cat([x, self.steps.unsqueeze(1) / 10], 1)}

    def step(self, action):
        assert (action.abs() <= 1).all()
        self.x = self.x + 0.3 * action
        self.steps += 1
        reward = -self.x.norm(dim=1)
        truncated = self.steps >= 10
        invalid = torch.rand(len(self.x), generator=self.generator) < self.invalid_share
        final_obs = self.obs(self.x)
        ended = truncated | invalid
        self.steps[ended] = 0
        self.x = torch.where(ended.unsqueeze(1), self.start(len(self.x)), self.x)
        terminated = torch.zeros_like(ended)
        return self.obs(self.x), reward, terminated, truncated, {"final_obs": final_obs, "invalid": invalid}


def collect(ppo, env, obs=None, steps=None):
    """Act and observe; returns the next observation."""
    obs = env.obs(env.x) if obs is None else obs
    for _ in range(steps or ppo.steps_per_iteration):
        next_obs, *outcome, info = env.step(ppo.act(obs))
        ppo.observe(next_obs, *outcome, info)
        obs = next_obs
    return obs


def weights(ppo):
    return [p.detach().clone() for p in (*ppo.policy.parameters(), *ppo.critic.parameters())]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_ratio_is_exactly_one_before_the_first_step():
    ppo, env = make_ppo(), PointMass()
    obs = None
    for _ in range(3):  # also after updates of weights and normalisers
        obs = collect(ppo, env, obs)
        stored = ppo.rollout
        for t in range(stored.num_steps):
            score = ppo.policy.evaluate({"policy": stored.obs["policy"][t]}, {"action": stored.trace["action"][t]})
            assert torch.equal(score.log_prob, stored.log_prob[t])
        assert stored.trace["action"].abs().max() > 1  # what is learned from is not clipped
        ppo.update()


def test_one_full_batch_step_has_no_kl_and_clips_nothing():
    options = replace(SMALL, epochs=1, minibatch_size=6 * WORLDS)
    ppo, env = make_ppo(options), PointMass()
    collect(ppo, env)
    metrics = ppo.update()
    assert metrics["kl"].item() == pytest.approx(0, abs=1e-9)
    assert metrics["clip_fraction"] == 0
    assert metrics["policy_loss"].item() == pytest.approx(0, abs=1e-6)  # the mean of normalised advantages


def test_metrics_are_scalars_on_the_device_under_known_names():
    ppo = make_ppo()
    collect(ppo, PointMass())
    metrics = ppo.update()
    names = "policy_loss value_loss entropy kl clip_fraction grad_norm std_mean lr explained_variance"
    assert set(metrics) == set(names.split())
    assert all(x.shape == () and x.isfinite() for x in metrics.values())


def test_every_epoch_visits_every_transition_once_in_a_new_order():
    ppo = make_ppo(replace(SMALL, epochs=3, minibatch_size=25))  # does not divide the batch of 96
    collect(ppo, PointMass())
    seen, learn = [], ppo.surrogate._learn

    def spy(batch, index, threads):
        seen.append(batch["log_prob"][index])
        return learn(batch, index, threads)

    ppo.surrogate._learn = spy
    everything = ppo.rollout.log_prob.flatten().sort().values.clone()
    ppo.update()
    assert [len(x) for x in seen] == [24] * 12
    epochs = [torch.cat(seen[i : i + 4]) for i in (0, 4, 8)]
    assert all(torch.equal(order.sort().values, everything) for order in epochs)
    assert not torch.equal(epochs[0], epochs[1])


def run_with_invalid(spoil):
    """Two updates in which some worlds are invalid, their data spoilt by `spoil`; the weights and statistics after."""
    ppo, env = make_ppo(), PointMass(invalid_share=0.2)
    obs = env.obs(env.x)
    for _ in range(2):
        for _ in range(ppo.steps_per_iteration):
            next_obs, reward, terminated, truncated, info = env.step(ppo.act(obs))
            bad = info["invalid"]
            reward[bad] = spoil
            for x in info["final_obs"].values():
                x[bad] = spoil
            ppo.observe(next_obs, reward, terminated, truncated, info)
            obs = next_obs
        ppo.update()
    return [*weights(ppo), *ppo.policy.buffers(), *ppo.critic.buffers()]


def test_nan_in_invalid_worlds_changes_nothing():
    assert same(run_with_invalid(0.0), run_with_invalid(torch.nan))


def test_nan_observation_acted_on_in_an_invalid_world_is_not_learned_from():
    results = []
    for spoil in (0.0, torch.nan):
        ppo, env = make_ppo(), PointMass()
        obs = env.obs(env.x)
        for _ in range(ppo.steps_per_iteration):
            for x in obs.values():
                x[3] = spoil  # a quarantined world
            action = torch.nan_to_num(ppo.act(obs))
            obs, *outcome, info = env.step(action)
            info["invalid"][3] = True
            ppo.observe(obs, *outcome, info)
        ppo.update()
        results.append([*weights(ppo), *ppo.policy.buffers(), *ppo.critic.buffers()])
        assert ppo.policy.normaliser.count == 6 * (WORLDS - 1)
    assert same(*results)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda r: r.obs["policy"], "observation group 'policy'"),
        (lambda r: r.obs["critic"], "observation group 'critic'"),
        (lambda r: r.reward, "the reward"),
        (lambda r: r.log_prob, "the log-probability"),
        (lambda r: r.next_value, "the critic's value of the final observation"),
    ],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_fault_names_the_cause_and_the_weights_stay(spoil, cause, value):
    ppo = make_ppo()
    collect(ppo, PointMass())
    before = weights(ppo)
    spoil(ppo.rollout)[4, 7] = value
    with pytest.raises(Fault, match=f"^{cause}.* is not finite, first at step 4 of the rollout in world 7"):
        ppo.update()
    assert same(before, weights(ppo))


def test_fault_if_the_update_itself_diverges():
    ppo = make_ppo(replace(SMALL, learning_rate=1e30, desired_kl=None))
    collect(ppo, PointMass())
    with pytest.raises(Fault, match=r"the update diverged: .*policy_loss.* lower algo\.learning_rate"):
        ppo.update()


def test_saved_and_restored_it_continues_bit_for_bit(tmp_path):
    ppo, env = make_ppo(), PointMass()
    obs = None
    for _ in range(2):
        obs = collect(ppo, env, obs)
        ppo.update()
    obs = collect(ppo, env, obs, steps=2)
    action = ppo.act(obs)  # whose outcome is not known yet
    torch.save(ppo.state_dict(), tmp_path / "state.pt")
    other = make_ppo(seed=9)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    finals = []
    for learner, world in ((ppo, env), (other, copy.deepcopy(env))):
        next_obs, *outcome, info = world.step(action)
        learner.observe(next_obs, *outcome, info)
        present = collect(learner, world, next_obs, steps=3)
        first = learner.update()
        collect(learner, world, present)
        finals.append([*weights(learner), *first.values(), *learner.update().values()])
    assert same(*finals)


def test_an_empty_rollout_is_saved_as_next_to_nothing():
    ppo = make_ppo()
    collect(ppo, PointMass())
    ppo.update()
    assert all(x.numel() == 0 for x in ppo.rollout.state_dict()["tensors"].values())


def test_same_seed_same_weights_other_seed_others():
    results = []
    for seed in (0, 0, 1):
        ppo = make_ppo(seed=seed)
        collect(ppo, PointMass())
        ppo.update()
        results.append(weights(ppo))
    assert same(results[0], results[1])
    assert not same(results[0], results[2])


def test_learning_rate_moves_once_an_update_and_not_at_all_if_fixed():
    ppo, env = make_ppo(replace(SMALL, desired_kl=1e3)), PointMass()  # always far below the desired one
    collect(ppo, env)
    assert ppo.update()["lr"].item() == pytest.approx(1.5e-3)
    rates = [group["lr"].item() for group in ppo.surrogate.optimiser.param_groups]
    assert rates == pytest.approx([1.5e-3, 1e-3])  # the policy's follows, the critic's does not
    ppo = make_ppo(replace(SMALL, desired_kl=None))
    collect(ppo, PointMass())
    assert ppo.update()["lr"].item() == pytest.approx(1e-3)


@pytest.mark.parametrize("size", [0, -4, 97])
def test_a_minibatch_outside_the_batch_is_refused_with_its_size(size):
    with pytest.raises(BadInput, match=rf"algo\.minibatch_size={size}: .*batch of 96 transitions \(6 steps of 16"):
        PPO.validate(replace(SMALL, minibatch_size=size), WORLDS)


def test_minibatches_from_one_transition_to_all_are_accepted():
    for size in (None, 1, 96):
        PPO.validate(replace(SMALL, minibatch_size=size), WORLDS)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_steps": 0},
        {"gamma": 1.0},
        {"lam": 1.5},
        {"epochs": 0},
        {"learning_rate": 0.0},
        {"learning_rate": 0.5},
        {"learning_rate": 0.0, "desired_kl": None},
        {"desired_kl": -0.01},
        {"clip": 0.0},
        {"entropy": -1.0},
        {"value_coef": 0.0},
        {"max_grad_norm": 0.0},
        {"critic_hidden": [0]},
    ],
)
def test_options_outside_their_range_are_refused_by_name(bad):
    with pytest.raises(BadInput, match=rf"algo\.{next(iter(bad))}=.*: expected"):
        make_ppo(replace(SMALL, **bad))


def test_calls_out_of_turn_are_refused():
    ppo, env = make_ppo(), PointMass()
    obs = collect(ppo, env, steps=1)
    with pytest.raises(RuntimeError, match="update after 1 of 6 steps"):
        ppo.update()
    next_obs, *outcome, info = env.step(ppo.act(obs))
    with pytest.raises(RuntimeError, match="out of turn"):
        ppo.act(obs)
    ppo.observe(next_obs, *outcome, info)
    with pytest.raises(RuntimeError, match="without an act"):
        ppo.observe(next_obs, *outcome, info)


def learn_on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    torch.manual_seed(rank)  # even if a rank starts from other weights
    policy = GaussianPolicy(MLPOptions(hidden=[16]), SIZES, 2)
    ppo = PPO(SMALL, policy, SIZES, 2, WORLDS, "cpu", 0)
    env = PointMass(seed=rank)
    obs = collect(ppo, env)
    actions = ppo.rollout.trace["action"].clone()
    ppo.update()
    collect(ppo, env, obs)
    ppo.update()
    torch.save({"actions": actions, "policy": policy.state_dict(), "critic": ppo.critic.state_dict()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_act_apart_and_learn_together(tmp_path):
    mp.spawn(learn_on_rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert not torch.equal(first["actions"], second["actions"])
    for part in ("policy", "critic"):
        assert all(torch.equal(x, second[part][name]) for name, x in first[part].items())
    assert first["policy"]["normaliser.count"] == 2 * 2 * 6 * WORLDS


@pytest.mark.learning
def test_critic_learns_the_closed_form_value_under_a_time_limit():
    """x grows by one a step and is the reward, cut after 5 steps: V(x) = x / (1 - g) + g / (1 - g)^2."""
    gamma, worlds = 0.9, 64
    options = PPOOptions(num_steps=10, gamma=gamma, critic_hidden=[], learning_rate=0.02, desired_kl=None, epochs=8)
    ppo = make_ppo(options, {"policy": 1, "critic": 1}, 1, worlds)
    x = 10 * torch.rand(worlds, 1)
    steps = torch.randint(0, 5, (worlds,))
    no = torch.zeros(worlds, dtype=torch.bool)
    for _ in range(60):
        for _ in range(10):
            ppo.act({"policy": x, "critic": x})
            reward, final, steps = x[:, 0], x + 1, steps + 1
            truncated = steps >= 5
            steps = steps * ~truncated
            x = torch.where(truncated.unsqueeze(1), 10 * torch.rand(worlds, 1), final)
            info = {"final_obs": {"policy": final, "critic": final}, "invalid": no}
            ppo.observe({"policy": x, "critic": x}, reward, no, truncated, info)
        metrics = ppo.update()
    grid = torch.linspace(0, 14, 8).unsqueeze(1)
    exact = grid[:, 0] / (1 - gamma) + gamma / (1 - gamma) ** 2
    torch.testing.assert_close(ppo.critic({"critic": grid}).detach(), exact, rtol=0.03, atol=0)
    assert metrics["explained_variance"] > 0.95


@pytest.mark.learning
def test_point_mass_is_learned():
    worlds = 64
    ppo = make_ppo(PPOOptions(num_steps=16, gamma=0.9, critic_hidden=[32]), worlds=worlds)
    env, obs = PointMass(worlds, invalid_share=0.02), None
    for _ in range(60):
        obs = collect(ppo, env, obs)
        ppo.update()
    x = PointMass(200, seed=5).x
    start = x.norm(dim=1).mean()
    for _ in range(8):
        action = ppo.policy.act({"policy": x}, deterministic=True).action[:, 0].clamp(-1, 1)
        x = x + 0.3 * action
    assert x.norm(dim=1).mean() < 0.1 * start
    assert ppo.policy.std.mean() < 0.6  # exploration shrank from 0.8
