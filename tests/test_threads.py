import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_ppo import SMALL, PointMass, collect, make_ppo, weights
from torch import nn

from embodied.algos.threads import ROWS, each, one_thread, pieces
from embodied.policies.networks import MLP, mlp


@given(rows=st.integers(1, 70_000), threads=st.integers(1, 9), uses=st.integers(1, 3))
def test_pieces_hold_everything_in_order_and_none_is_large(rows, threads, uses):
    index = torch.arange(rows)
    parts = pieces(index, threads, uses)
    assert torch.equal(torch.cat(list(parts)), index)
    assert max(map(len, parts)) <= ROWS and min(map(len, parts)) >= 1
    assert len(parts) * uses % threads == 0 or len(parts) == rows
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_thread_gives_back_what_there_was():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), one_thread() as threads:
        assert threads == before and torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before


def gradients(network: MLP, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(network(x).square().sum(), list(network.parameters())))


@pytest.mark.parametrize("activation", ["elu", "relu", "tanh"])
def test_threads_do_not_write_into_each_others_buffers(activation):
    torch.manual_seed(0)
    network = mlp([9, 32, 32, 3], activation)
    items = [torch.randn(200 + 7 * i, 9) for i in range(60)]
    with one_thread():
        alone = [gradients(network, x) for x in items]
        for _ in range(5):
            together = each(lambda x: gradients(network, x), items, 8)
            assert all(torch.equal(a, b) for x, y in zip(alone, together, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("activation", ["elu", "relu", "silu", "tanh"])
def test_an_mlp_is_its_layers_in_sequence(activation):
    torch.manual_seed(0)
    network, layers = mlp([9, 32, 16, 3], activation), None
    x = torch.randn(50, 9, requires_grad=True)
    layers = nn.Sequential.forward(network, x)
    torch.testing.assert_close(network(x), layers, atol=1e-6, rtol=1e-5)
    inputs = [x, *network.parameters()]
    for a, b in zip(
        torch.autograd.grad(network(x).exp().sum(), inputs), torch.autograd.grad(layers.exp().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_an_mlp_may_be_evaluated_again_before_its_gradient_is_taken():
    torch.manual_seed(0)
    network = mlp([9, 32, 3], "elu")
    first, second = torch.randn(2, 40, 9).unbind()
    expected = [a + b for a, b in zip(gradients(network, first), gradients(network, second), strict=True)]
    loss = network(first).square().sum() + network(second).square().sum()
    network(torch.randn(40, 9))
    for retain in (True, False):
        got = torch.autograd.grad(loss, list(network.parameters()), retain_graph=retain)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))


def test_a_weight_changed_before_the_gradient_is_taken_is_noticed():
    network = mlp([9, 32, 3], "elu")
    loss = network(torch.randn(4, 9)).sum()
    with torch.no_grad():
        network[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_update_is_the_same_on_any_number_of_threads():
    after = []
    for threads in (1, 3):
        with one_thread():
            torch.set_num_threads(threads)
            ppo = make_ppo(SMALL)
            collect(ppo, PointMass())
            metrics = ppo.update()
            after.append([*weights(ppo), *metrics.values()])
    for a, b in zip(*after, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_what_an_update_returns_keeps_no_graph():
    ppo = make_ppo(SMALL)
    collect(ppo, PointMass())
    batch = {name: x.flatten(0, 1) for name, x in ppo.rollout.obs.items()}
    batch |= {name: torch.zeros(len(batch["policy"])) for name in ("log_prob", "advantage", "target")}
    batch |= {"action": ppo.rollout.trace["action"].flatten(0, 1)}
    batch |= dict.fromkeys(("valid", "own"), torch.ones(len(batch["policy"]), dtype=torch.bool))
    metrics = ppo.surrogate._learn(batch, torch.arange(20), 2)
    assert not any(x.requires_grad for x in metrics.values())


def test_values_are_those_of_the_observations_acted_on():
    ppo = make_ppo(SMALL)
    obs = collect(ppo, PointMass())
    ppo.update()
    collect(ppo, PointMass(seed=1), obs)
    with torch.no_grad():
        expected = torch.stack([ppo.critic({"critic": x}) for x in ppo.rollout.obs["critic"]])
    torch.testing.assert_close(ppo.rollout.value, expected, atol=1e-5, rtol=1e-5)
