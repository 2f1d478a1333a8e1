"""Level replay, sampling for learnability and the linear curriculum, against their definitions one slot at a time."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_tools import make, make_slots, record
from scipy import stats

from embodied.sim.resets import ResetBank
from embodied.sim.samplers.linear import Linear, LinearOptions
from embodied.sim.samplers.plr import PLR, PLROptions, probabilities
from embodied.sim.samplers.sfl import SFL, SFLOptions
from embodied.spec.errors import BadInput
from embodied.spec.protocols import ScoringSampler, Trials, TryingSampler


def test_which_sampler_asks_for_what():
    asks = {cls: make(cls, options()) for cls, options in ((PLR, PLROptions), (SFL, SFLOptions), (Linear, LinearOptions))}
    assert [isinstance(sampler, ScoringSampler) for sampler in asks.values()] == [True, False, False]
    assert [isinstance(sampler, TryingSampler) for sampler in asks.values()] == [False, True, False]


# -- prioritised level replay --------------------------------------------------------------------------------------------


class SlowReplay:
    """Scores, ranks and staleness as in the paper's section 3, one level at a time."""

    def __init__(self, num_slots):
        self.scores = [None] * num_slots
        self.ages = [0] * num_slots

    def record(self, slots):
        self.ages = [0 if slot in slots else age + 1 for slot, age in enumerate(self.ages)]

    def score(self, slots, abs_advantage):
        met = {}
        for slot, value in zip(slots, abs_advantage, strict=True):
            if slot >= 0:
                met.setdefault(slot, []).append(value)
        for slot, values in met.items():
            self.scores[slot] = sum(values) / len(values)

    def probabilities(self, beta, rho):
        seen = [slot for slot, score in enumerate(self.scores) if score is not None]
        unseen = [slot for slot, score in enumerate(self.scores) if score is None]
        p = [0.0] * len(self.scores)
        replay = len(seen) / len(p)
        order = sorted(seen, key=lambda slot: -self.scores[slot])
        by_rank = [(1 / (i + 1)) ** (1 / beta) for i in range(len(order))]
        ages = [self.ages[slot] for slot in seen]
        for i, slot in enumerate(order):
            stale = self.ages[slot] / sum(ages) if sum(ages) else 1 / len(seen)
            p[slot] = replay * ((1 - rho) * by_rank[i] / sum(by_rank) + rho * stale)
        for slot in unseen:
            p[slot] = (1 - replay) / len(unseen)
        return p


@st.composite
def replays(draw):
    num_slots = draw(st.integers(1, 6))
    slot = st.integers(-1, num_slots - 1)
    step = st.tuples(slot, st.integers(1, 64).map(float))
    rollout = st.tuples(st.lists(st.lists(slot, min_size=4, max_size=4), max_size=4), st.lists(step, min_size=1, max_size=12))
    return num_slots, draw(st.sampled_from([0.1, 0.5, 2.0])), draw(st.sampled_from([0.0, 0.1, 1.0])), draw(st.lists(rollout))


@settings(deadline=None, max_examples=150)
@given(replays())
def test_replay_agrees_with_one_level_at_a_time(case):
    num_slots, beta, rho, rollouts = case
    sampler, slow = make(PLR, PLROptions(beta=beta, rho=rho), 4, num_slots), SlowReplay(num_slots)
    for ends, steps in rollouts:
        for slots in ends:
            record(sampler, slots, [False] * 4)
            slow.record(slots)
        slots, values = zip(*steps, strict=True)
        sampler.score(torch.tensor(slots)[:, None], torch.tensor(values)[:, None])
        sampler.end_iteration()
        slow.score(slots, values)
    assert sampler.probabilities.tolist() == pytest.approx(slow.probabilities(beta, rho), rel=1e-9, abs=1e-15)
    assert sampler.probabilities.sum() == pytest.approx(1)


def test_replay_draws_only_what_is_new_until_it_is_scored_and_then_what_scores_most():
    sampler = make(PLR, PLROptions(), 1000, 10)
    assert len(sampler.sample().unique()) == 10
    slots = torch.arange(9).repeat(3, 1)
    sampler.score(slots, 1.0 + slots)
    sampler.end_iteration()
    counts = torch.bincount(sampler.sample(), minlength=10)
    # nine tenths replay, of which nine tenths by rank (the first gets .999) and a tenth by age; a tenth is new
    assert counts[8] > 750 and 60 < counts[9] < 140
    before = sampler.probabilities
    record(sampler, [3, 4], [True, False])
    assert sampler.probabilities is before  # anew only once an iteration


def test_replay_needs_no_host_read():
    scores, ages = torch.empty(9, dtype=torch.float64, device="meta"), torch.empty(9, dtype=torch.int64, device="meta")
    assert probabilities(scores, scores > 0, ages, PLROptions()).shape == (9,)


@pytest.mark.parametrize("bad", [{"beta": 0.0}, {"beta": float("nan")}, {"rho": 1.1}, {"rho": -0.1}, {"history": 0}])
def test_replay_options_out_of_range_are_refused(bad):
    with pytest.raises(BadInput, match=f"sampler.{next(iter(bad))} must be"):
        PLR.validate(PLROptions(**bad))


# -- sampling for learnability -------------------------------------------------------------------------------------------


class Trier:
    """Success of a slot in so many of its episodes as the table says; keeps what it was asked."""

    def __init__(self, solved, episodes, invalid=()):
        self.solved, self.episodes, self.invalid, self.asked, self.seeds = solved, episodes, invalid, [], []

    def __call__(self, slots, seed):
        self.asked.append(slots)
        self.seeds.append(seed)
        number = torch.arange(len(slots)) % self.episodes
        valid = torch.tensor([slot not in self.invalid for slot in slots.tolist()])
        return Trials((number < self.solved[slots]) | ~valid, valid, 7 * len(slots))


def make_sfl(solved, invalid=(), **changes):
    options = SFLOptions(**{"num_levels": 6, "episodes": 4, "buffer_size": 2, "update_period": 3, **changes})
    sampler = make(SFL, options, 10_000, len(solved))
    sampler.evaluate = Trier(torch.tensor(solved), options.episodes, invalid)
    return sampler, sampler.evaluate


def test_the_most_learnable_of_what_was_tried_are_drawn_half_of_the_time():
    sampler, trier = make_sfl([0, 1, 2, 3, 4, 4, 0, 2, 2], num_levels=20)  # more than there are: all
    assert sampler.probabilities.tolist() == pytest.approx([1 / 9] * 9)
    assert sampler.end_iteration() == 7 * 36
    assert sorted(trier.asked[0].tolist()) == sorted(list(range(9)) * 4)
    chosen = sampler.chosen.nonzero()[:, 0].tolist()
    assert len(chosen) == 2 and set(chosen) <= {2, 7, 8}  # p = .5, two of three at random
    expected = [0.5 / 9 + 0.25 * (slot in chosen) for slot in range(9)]
    assert sampler.probabilities.tolist() == pytest.approx(expected)
    counts = torch.bincount(sampler.sample(), minlength=9)
    assert stats.chisquare(counts, 10_000 * torch.tensor(expected, dtype=torch.float64)).pvalue > 1e-3
    assert sampler.metrics()["learnability"] == pytest.approx(0.25)


def test_equals_are_kept_at_random_not_the_first_of_the_bank():
    kept = torch.zeros(40)
    for seed in range(60):
        sampler = make(SFL, SFLOptions(num_levels=40, episodes=1, buffer_size=10, update_period=1), 8, 40, seed=seed)
        sampler.evaluate = Trier(torch.zeros(40), 1)
        sampler.end_iteration()
        kept += sampler.chosen
    assert stats.chisquare(kept).pvalue > 1e-3


def test_trials_come_after_the_first_iteration_and_then_once_a_period_of_others_each_time():
    sampler, trier = make_sfl([1] * 30)
    steps = [sampler.end_iteration() for _ in range(7)]
    assert steps == [7 * 24, 0, 0, 7 * 24, 0, 0, 7 * 24]
    tried = [frozenset(slots.tolist()) for slots in trier.asked]
    assert all(len(some) == 6 for some in tried) and len(set(tried)) == 3 and len(set(trier.seeds)) == 3
    assert set(sampler.chosen.nonzero()[:, 0].tolist()) <= tried[-1]


def test_invalid_trials_tell_nothing():
    sampler, _ = make_sfl([1, 4, 4, 4], invalid={2})  # slot 2: no valid episode, whatever its success says
    sampler.end_iteration()
    assert sampler.chosen[0] and sampler.metrics()["learnability"] == pytest.approx((1 / 4 * 3 / 4 + 0) / 2)


def test_without_someone_to_try_it_says_so():
    with pytest.raises(RuntimeError, match="needs its `evaluate`"):
        make(SFL, SFLOptions()).end_iteration()


def test_a_saved_sampler_tries_the_same_next():
    sampler, trier = make_sfl([1] * 30)
    for _ in range(2):
        sampler.end_iteration()
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    other, others = make_sfl([1] * 30)
    other.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(2):
        assert torch.equal(sampler.sample(), other.sample())
        assert sampler.end_iteration() == other.end_iteration()
    assert torch.equal(trier.asked[-1], others.asked[-1]) and trier.seeds[-1] == others.seeds[-1] and len(others.asked) == 1
    assert torch.equal(sampler.chosen, other.chosen)


@pytest.mark.parametrize(
    "bad",
    [{"num_levels": 0}, {"episodes": 0}, {"buffer_size": 0}, {"buffer_size": 513}, {"update_period": 0}, {"rho": 1.5}],
)
def test_learnability_options_out_of_range_are_refused(bad):
    with pytest.raises(BadInput, match=f"sampler.{next(iter(bad))}"):
        SFL.validate(SFLOptions(**bad))


# -- the linear curriculum -----------------------------------------------------------------------------------------------


def make_linear(difficulty, worlds, seed=0, **options):
    return Linear(LinearOptions(**options), make_slots(len(difficulty), worlds, seed=seed, difficulty=torch.tensor(difficulty)))


def test_levels_are_equal_ranges_of_difficulty_and_the_empty_ones_are_left_out():
    # five ranges of 2 from 0 to 10: 0-2, 2-4, (4-6), (6-8), 8-10
    sampler = make_linear([9.0, 0.0, 1.9, 10.0, 2.0, 3.9, 8.0], 4, num_levels=5, max_init_level=0)
    assert sampler.level_of.tolist() == [2, 0, 0, 2, 1, 1, 2]
    assert sampler.levels.tolist() == [0] * 4
    one = make_linear([3.0, 3.0], 4)
    assert one.level_of.tolist() == [0, 0] and one.levels.tolist() == [0] * 4


def test_a_success_promotes_a_failure_demotes_and_what_is_not_recorded_moves_nothing():
    sampler = make_linear([float(x) for x in range(40)], 8, num_levels=4, max_init_level=0)
    sampler.levels.copy_(torch.tensor([0, 0, 1, 1, 2, 2, 1, 2]))
    slots = torch.tensor([0, 0, 0, 0, 0, 0, -1, 0])
    success = torch.tensor([True, False, True, False, True, False, True, True])
    valid = torch.tensor([True] * 7 + [False])
    sampler.record(slots, success, valid, torch.zeros(8))
    assert sampler.levels.tolist() == [1, 0, 2, 0, 3, 1, 1, 2]
    assert sampler.metrics()["level"] == pytest.approx(10 / 8)


def test_beyond_the_last_level_worlds_go_anywhere():
    sampler = make_linear([float(x) for x in range(40)], 8000, num_levels=4, max_init_level=0)
    sampler.levels.fill_(3)
    record(sampler, torch.zeros(8000, dtype=torch.int64), torch.ones(8000, dtype=torch.bool))
    assert stats.chisquare(torch.bincount(sampler.levels)).pvalue > 1e-3


def test_worlds_begin_at_random_levels_up_to_the_given_one():
    counts = torch.bincount(make_linear([float(x) for x in range(100)], 6000).levels, minlength=10)
    assert counts[6:].sum() == 0 and stats.chisquare(counts[:6]).pvalue > 1e-3


def test_a_world_starts_anywhere_in_its_level_and_the_metrics_know():
    sampler = make_linear([0.0, 5.0, 0.5, 9.0, 10.0, 0.9], 9000, num_levels=4, max_init_level=0)  # levels 0 2 0 3 3 0, less 1
    sampler.levels.copy_(torch.tensor([0, 0, 2]).repeat(3000))
    expected = torch.tensor([2 / 9, 0, 2 / 9, 1 / 6, 1 / 6, 2 / 9])
    torch.testing.assert_close(sampler.probabilities.float(), expected)
    slots = sampler.sample()
    assert torch.equal(sampler.level_of[slots], sampler.levels)
    counts = torch.bincount(slots, minlength=6)
    assert counts[1] == 0
    kept = expected > 0
    assert stats.chisquare(counts[kept], 9000 * expected[kept].double()).pvalue > 1e-3


@pytest.mark.parametrize("bad", [{"num_levels": 0}, {"max_init_level": -1}, {"max_init_level": 10}])
def test_curriculum_options_out_of_range_are_refused(bad):
    with pytest.raises(BadInput, match=f"sampler.{next(iter(bad))} must be"):
        Linear.validate(LinearOptions(**bad))


def test_a_bank_without_measured_difficulty_is_ordered_by_its_tags():
    tags = torch.tensor([2, 0, 1, 1])
    bank = ResetBank(torch.zeros(4, 3), tags, ("a", "b", "c"), "engine", "hash")
    slots = bank.slots(8, 0, torch.device("cpu"))
    assert slots.difficulty.tolist() == [2.0, 0.0, 1.0, 1.0]
    assert Linear(LinearOptions(), slots).level_of.tolist() == [2, 0, 1, 1]
