import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributions import Normal

from embodied.policies import normaliser as normaliser_module
from embodied.policies.gaussian import Critic, GaussianPolicy, MLPOptions
from embodied.policies.networks import mlp
from embodied.policies.normaliser import RunningNormaliser
from embodied.spec.errors import BadInput

SIZES = {"policy": 5, "critic": 7}


def make_policy(**options):
    torch.manual_seed(0)
    policy = GaussianPolicy(MLPOptions(hidden=[16, 16], **options), SIZES, 3)
    policy.seed(1)
    return policy


def make_obs(rows=32):
    generator = torch.Generator().manual_seed(5)
    return {group: torch.randn(rows, size, generator=generator) for group, size in SIZES.items()}


def test_mlp_weights_are_orthogonal_with_the_gains_asked_for():
    network = mlp([64, 32, 8], "elu", last_gain=0.01)
    hidden, last = network[0].weight, network[-1].weight
    torch.testing.assert_close(hidden @ hidden.T, 2 * torch.eye(32), atol=1e-5, rtol=0)
    torch.testing.assert_close(last @ last.T, 1e-4 * torch.eye(8), atol=1e-8, rtol=0)
    assert all(not layer.bias.any() for layer in (network[0], network[-1]))


def test_mlp_draws_from_the_generator_given():
    first, second = (mlp([4, 4, 2], "relu", generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("activation", ["elu", "relu", "silu", "tanh"])
def test_gradients_of_every_activation_match_finite_differences(activation):
    network = mlp([3, 4, 1], activation).double()
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in network.named_parameters()]

    def output(x, *parameters):
        return torch.func.functional_call(network, dict(zip(names, parameters, strict=True)), x)

    assert torch.autograd.gradcheck(output, (x, *network.parameters()))


def test_bad_network_options_say_what_is_valid():
    with pytest.raises(BadInput, match="unknown activation 'rellu': did you mean 'relu'"):
        mlp([2, 2], "rellu")
    with pytest.raises(BadInput, match="at least 1"):
        mlp([2, 0, 2], "relu")


def test_normaliser_starts_as_identity():
    x = torch.randn(9, 4)
    assert torch.equal(RunningNormaliser(4)(x), x)


@pytest.mark.parametrize(("offset", "spread"), [(0.0, 1.0), (1e6, 1.0), (-1e6, 300.0), (3.0, 1e-3), (0.0, 1e5)])
def test_normaliser_agrees_with_numpy_over_all_the_data(offset, spread, monkeypatch):
    monkeypatch.setattr(normaliser_module, "CHUNK", 37)  # several chunks a batch
    rng = np.random.default_rng(3)
    running = RunningNormaliser(3)
    kept = []
    for rows in (1, 200, 0, 50):
        x = (offset + spread * rng.standard_normal((rows, 3))).astype(np.float32)
        mask = rng.random(rows) < 0.7 if rows > 1 else np.ones(rows, bool)
        kept.append(x[mask])
        x[~mask] = np.nan
        running.update(torch.from_numpy(x), torch.from_numpy(mask))
    data = np.concatenate(kept).astype(np.float64)
    assert running.count == len(data)
    np.testing.assert_allclose(running.mean, data.mean(0), rtol=1e-12, atol=1e-9 * spread)
    np.testing.assert_allclose(running.m2 / len(data), data.var(0), rtol=1e-5)
    x = torch.from_numpy(data[:20].astype(np.float32))
    expected = (data[:20] - data.mean(0)) / np.sqrt(data.var(0) + 1e-8)
    np.testing.assert_allclose(running(x), expected, rtol=1e-4, atol=0.05 if abs(offset) > 1e5 else 1e-3)


def test_normaliser_clips_at_ten_deviations_and_survives_a_constant():
    running = RunningNormaliser(2)
    running.update(torch.tensor([[0.7, -1.0], [0.7, 1.0]]), torch.ones(2, dtype=torch.bool))
    out = running(torch.tensor([[0.7, 1e6], [0.7, -1e6]]))
    torch.testing.assert_close(out, torch.tensor([[0.0, 10.0], [0.0, -10.0]]))


def test_normaliser_with_nothing_to_take_in_stays_as_it_was():
    running = RunningNormaliser(2)
    running.update(torch.full((3, 2), torch.nan), torch.zeros(3, dtype=torch.bool))
    x = torch.randn(4, 2)
    assert torch.equal(running(x), x)


def merge_on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    running = RunningNormaliser(3)
    for batch in torch.load(f"{folder}/data.pt"):
        mine = batch[:10] if rank == 0 else batch[10:]  # of unequal size
        running.update(mine, torch.ones(len(mine), dtype=torch.bool))
    torch.save(running.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_normaliser_over_two_ranks_equals_one_over_all_the_data(tmp_path: Path):
    data = [1e4 + torch.randn(60, 3), torch.randn(25, 3)]
    torch.save(data, tmp_path / "data.pt")
    mp.spawn(merge_on_rank, (str(tmp_path),), nprocs=2)
    both = np.concatenate(data).astype(np.float64)
    states = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert states[0]["count"] == 85
    np.testing.assert_allclose(states[0]["mean"], both.mean(0), rtol=1e-12)
    np.testing.assert_allclose(states[0]["m2"] / 85, both.var(0), rtol=1e-6)


def test_std_begins_where_asked_and_never_falls_below_its_floor():
    policy = make_policy(init_std=0.6, min_std=0.1)
    torch.testing.assert_close(policy.std, torch.full((3,), 0.6))
    for raw in (-5.0, -1000.0):
        with torch.no_grad():
            policy.raw_std.fill_(raw)
        assert (policy.std >= 0.1).all()
    policy.raw_std.data.fill_(-5.0)
    policy.std.sum().backward()
    assert (policy.raw_std.grad > 0).all()  # near the floor there is still a way up


def test_log_prob_and_entropy_agree_with_torch_distributions():
    policy, obs = make_policy(), make_obs()
    policy.raw_std.data.copy_(torch.tensor([-1.0, 0.3, 2.0]))
    step = policy.act(obs)
    action = step.trace["action"]
    reference = Normal(policy(obs["policy"]), policy.std)
    score = policy.evaluate(obs, step.trace)
    torch.testing.assert_close(step.log_prob, reference.log_prob(action).sum(-1))
    torch.testing.assert_close(score.log_prob, reference.log_prob(action).sum(-1))
    torch.testing.assert_close(score.entropy, reference.entropy().sum(-1))
    assert step.action.shape == (32, 1, 3)
    assert torch.equal(step.action[:, 0], action)


def test_evaluate_returns_the_recorded_log_prob_bit_for_bit():
    policy, obs = make_policy(), make_obs()
    policy.update_normaliser(obs, torch.ones(32, dtype=torch.bool))
    for deterministic in (False, True):
        step = policy.act(obs, deterministic=deterministic)
        assert torch.equal(policy.evaluate(obs, step.trace).log_prob, step.log_prob)


def test_samples_have_the_policys_mean_and_deviation():
    policy = make_policy()
    obs = {"policy": torch.ones(20_000, 5)}
    action = policy.act(obs).action[:, 0]
    torch.testing.assert_close(action.mean(0), policy(obs["policy"])[0], atol=4 * 0.8 / math.sqrt(20_000), rtol=0)
    torch.testing.assert_close(action.std(0), policy.std, atol=0, rtol=0.03)


def test_noise_comes_from_the_policys_own_generator():
    policy, obs = make_policy(), make_obs()
    state = policy.generator.get_state()
    first = policy.act(obs).action
    torch.randn(10)  # the global stream does not matter
    policy.generator.set_state(state)
    policy.act(obs, deterministic=True)  # nor do deterministic actions
    assert torch.equal(policy.act(obs).action, first)
    policy.seed(2)
    assert not torch.equal(policy.act(obs).action, first)


def test_critic_answers_in_reward_units_and_learns_in_normalised_ones():
    critic, obs = Critic(SIZES, [8]), make_obs()
    returns = 300 + 50 * torch.randn(400)
    before = critic(obs)
    torch.testing.assert_close(before, critic.normalised_value(obs))
    critic.update_returns(returns, torch.ones(400, dtype=torch.bool))
    rms = returns.double().square().mean().sqrt().item()
    torch.testing.assert_close(critic(obs), critic.normalised_value(obs) * rms)
    torch.testing.assert_close(critic.normalise(returns), returns / rms, rtol=1e-4, atol=1e-4)
    # a state of which nothing is known is worth next to nothing, whatever the returns have been
    assert critic(obs).abs().max() < 0.2 * rms


def test_policy_and_critic_say_what_is_wrong():
    with pytest.raises(BadInput, match="no observation group 'critic', only policy"):
        Critic({"policy": 5}, [8])
    with pytest.raises(BadInput, match="no observation group 'policy', only critic"):
        GaussianPolicy(MLPOptions(), {"critic": 5}, 2)
    with pytest.raises(BadInput, match=r"policy\.min_std=0\.9 and policy\.init_std=0\.5"):
        make_policy(min_std=0.9)
