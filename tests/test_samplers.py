"""The outcome table against lists of deques, probabilities against closed forms, draws against probabilities."""

import io
import math
from collections import deque
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_tools import PRESETS, kernel, make, make_slots, record
from scipy import stats

from embodied.sim.samplers.drawing import cumulate, draw
from embodied.sim.samplers.linear import Linear, LinearOptions
from embodied.sim.samplers.plr import PLR, PLROptions
from embodied.sim.samplers.sfl import SFL, SFLOptions
from embodied.sim.samplers.slots import Slots
from embodied.sim.samplers.success_guided import SuccessGuided, SuccessGuidedOptions, logits, probabilities
from embodied.sim.samplers.table import OutcomeTable
from embodied.sim.samplers.uniform import Uniform, UniformOptions
from embodied.spec.errors import BadInput

GUIDED = [(Uniform, UniformOptions), (SuccessGuided, SuccessGuidedOptions)]
SAMPLERS = [*GUIDED, (PLR, PLROptions), (SFL, SFLOptions), (Linear, LinearOptions)]


def zeros(n):
    return torch.zeros(n, dtype=torch.int64)


def make_table(num_slots, history, **options):
    return OutcomeTable(make_slots(num_slots), history, **options)


class Reference:
    """The table, one outcome at a time."""

    def __init__(self, num_slots, history, divide_by):
        self.history, self.divide_by = history, divide_by
        self.outcomes = [deque(maxlen=history) for _ in range(num_slots)]
        self.visits, self.best, self.age = [0] * num_slots, [0.0] * num_slots, [0] * num_slots
        self.forgotten = 0

    def rate(self, slot):
        outcomes = self.outcomes[slot]
        return sum(outcomes) / (self.history if self.divide_by == "history" else max(1, len(outcomes)))

    def record(self, rows):
        self.age = [age + 1 for age in self.age]
        touched = [slot for slot, _, valid in rows if valid and slot >= 0]
        for slot, success, valid in rows:
            if valid and slot >= 0:
                self.outcomes[slot].append(int(success))
                self.visits[slot] += 1
                self.age[slot] = 0
        for slot in set(touched):
            if self.best[slot] >= 0.9 and self.rate(slot) <= 0.5:
                self.forgotten += 1
                self.best[slot] = 0.0
            elif self.visits[slot] >= min(self.history, 10):
                self.best[slot] = max(self.best[slot], self.rate(slot))


@st.composite
def histories(draw_):
    num_slots, history = draw_(st.integers(1, 5)), draw_(st.integers(1, 12))
    # runs of equal outcomes, so that slots are mastered and forgotten
    row = st.tuples(st.integers(-1, num_slots - 1), st.sampled_from([True, True, False]), st.sampled_from([True] * 4 + [False]))
    run = st.tuples(row, st.integers(1, 15)).map(lambda pair: [pair[0]] * pair[1])
    call = st.lists(st.one_of(row.map(lambda r: [r]), run), max_size=8).map(lambda runs: [r for run in runs for r in run])
    return num_slots, history, draw_(st.sampled_from(["visits", "history"])), draw_(st.lists(call, max_size=8))


def columns(rows):
    slots = torch.tensor([r[0] for r in rows], dtype=torch.int64)
    success, valid = (torch.tensor([r[i] for r in rows], dtype=torch.bool) for i in (1, 2))
    return slots, success, valid


@pytest.mark.parametrize("compact", [True, False])  # as on a CPU, as elsewhere
@settings(deadline=None, max_examples=150)
@given(histories())
def test_table_agrees_with_lists_of_deques(compact, case):
    num_slots, history, divide_by, calls = case
    table, reference = make_table(num_slots, history, divide_by=divide_by), Reference(num_slots, history, divide_by)
    assert table.compact
    table.compact = compact
    for rows in calls:
        table.record(*columns(rows))
        reference.record(rows)
        assert table.visits[:num_slots].tolist() == reference.visits
        assert table.rates().tolist() == [reference.rate(slot) for slot in range(num_slots)]
        assert (table.records - table.last_record[:num_slots]).tolist() == reference.age
        assert table.forgotten.item() == reference.forgotten
        for slot, outcomes in enumerate(reference.outcomes):
            start = max(0, reference.visits[slot] - history)
            kept = [table.outcomes[slot, i % history].item() for i in range(start, reference.visits[slot])]
            assert kept == list(outcomes)


@settings(deadline=None, max_examples=50)
@given(histories())
def test_one_call_is_the_same_as_many(case):
    num_slots, history, divide_by, calls = case
    whole, parts = (make_table(num_slots, history, divide_by=divide_by) for _ in range(2))
    whole.record(*columns([row for rows in calls for row in rows]))
    for rows in calls:
        parts.record(*columns(rows))
    for name in ("outcomes", "visits", "sums"):
        assert torch.equal(getattr(whole, name)[:num_slots], getattr(parts, name)[:num_slots])


def test_forgotten_counts_falls_from_mastered_to_unsolved():
    table = make_table(2, 10)

    def add(slot, successes, failures):
        outcomes = [True] * successes + [False] * failures
        table.record(torch.full((len(outcomes),), slot), torch.tensor(outcomes), torch.ones(len(outcomes), dtype=torch.bool))
        return table.forgotten.item()

    assert add(1, 9, 0) == 0 and add(1, 0, 9) == 0  # nine outcomes say too little to call a slot mastered
    assert add(0, 10, 0) == 0
    assert add(0, 0, 4) == 0  # .6
    assert add(0, 0, 1) == 1  # .5
    assert add(0, 0, 5) == 1  # falling on is no second time
    assert add(0, 9, 0) == 1  # mastered again
    assert add(0, 0, 5) == 2


def test_nothing_is_read_back_to_the_host():
    # tensors on the meta device have no data: any read, copy to the host or data-dependent shape raises
    num_slots, rows = 7, 16
    slots = Slots(rows, zeros(num_slots), ("all",), torch.zeros(num_slots), "bank", 0, torch.device("meta"))
    table = OutcomeTable(slots, 4)
    flags = torch.empty(rows, dtype=torch.bool, device="meta")
    table.record(torch.empty(rows, dtype=torch.int64, device="meta"), flags, flags)
    options = SuccessGuidedOptions(max_age=3, uniform_fraction=0.1, quarantine=2)
    p = probabilities(table, logits(table.rates(), options), options)
    assert draw(cumulate(p), torch.empty(rows, dtype=torch.float64, device="meta")).shape == (rows,)
    assert all(value.shape == () for value in table.metrics(p).values())
    with pytest.raises((RuntimeError, NotImplementedError)):
        table.visits[table.visits > 0]


def test_memory_of_the_papers_locomotion_bank():
    table = make_table(104_000, 100)
    assert table.outcomes.nbytes == 10_400_000 + 100  # and the row of what is not recorded
    others = (table.visits, table.sums, table.last_record, table.best)
    assert sum(t.nbytes for t in others) < 0.35 * table.outcomes.nbytes


def ratio(rate, options):
    p = kernel(torch.tensor([rate, 0.0]), options)
    return (p[0] / p[1]).item()


def test_sampling_ratios_of_frontier_to_unsolved():
    manipulation, locomotion = (SuccessGuidedOptions(**PRESETS[name]) for name in ("manipulation", "locomotion"))
    assert ratio(0.5, manipulation) == pytest.approx(7.04, abs=0.005)
    assert ratio(0.5, SuccessGuidedOptions(**{**asdict(manipulation), "floor": 1e-8})) == pytest.approx(70.7, abs=0.05)
    # the unsolved are at the floor, w = 0: sqrt(w(p) / eps). "About 1420" is p = .4; the most, at the target, is 2014
    assert ratio(0.4, locomotion) == pytest.approx(1420, rel=0.01)
    assert ratio(0.66, locomotion) == pytest.approx(math.sqrt(0.66**3.3 * 0.34**1.7 / 1e-8), rel=1e-6)
    assert ratio(0.66, locomotion) == pytest.approx(2014, abs=1)


def test_kappa_and_temperature_only_matter_by_their_ratio_above_the_floor():
    rates = torch.linspace(0, 1, 101)
    a = kernel(rates, SuccessGuidedOptions(kappa=5.0, temperature=2.0, floor=1e-8))
    b = kernel(rates, SuccessGuidedOptions(kappa=2.5, temperature=1.0, floor=1e-8))
    inner = slice(10, 91)
    assert torch.allclose(a[inner] / a[66], b[inner] / b[66], rtol=1e-3, atol=0)
    assert a[0] / a[66] > 1000 * b[0] / b[66]  # the floor is sqrt(eps) in one and eps in the other


@pytest.mark.parametrize("preset", PRESETS)
def test_probabilities_are_a_tempered_beta_density(preset):
    options = SuccessGuidedOptions(**PRESETS[preset])
    rates = np.linspace(0.05, 0.95, 91)
    t, kappa = options.target, options.kappa
    expected = stats.beta(1 + kappa * t, 1 + kappa * (1 - t)).pdf(rates) ** (1 / options.temperature)
    got = kernel(torch.from_numpy(rates), options).numpy()
    assert got == pytest.approx(expected / expected.sum(), rel=2e-3)
    assert rates[got.argmax()] == pytest.approx(options.target, abs=0.01)


def test_presets_are_the_papers_and_the_default_is_locomotion_scaled_to_few_worlds():
    assert SuccessGuidedOptions(**PRESETS["manipulation"]) == SuccessGuidedOptions(100, 0.5, 1.0, 2.0, 1e-4, "visits")
    assert SuccessGuidedOptions(**PRESETS["locomotion"]) == SuccessGuidedOptions(100, 0.66, 5.0, 2.0, 1e-8, "visits")
    off = {"divide_by": "visits", "max_age": None, "uniform_fraction": 0.0, "quarantine": None}
    assert asdict(SuccessGuidedOptions()) == {**PRESETS["locomotion"], "history": 32, "floor": 1e-6, **off}


def counts_of(sampler, draws):
    assert sampler.slots.num_worlds == draws
    slots = sampler.sample()
    assert slots.shape == (draws,) and slots.dtype == torch.int64
    return torch.bincount(slots, minlength=sampler.table.num_slots).numpy()


def test_draws_follow_the_probabilities():
    draws, num_slots = 200_000, 40
    guided = make(SuccessGuided, SuccessGuidedOptions(**PRESETS["manipulation"]), draws, num_slots, seed=3)
    slots = torch.arange(num_slots).repeat_interleave(20)
    record(guided, slots, torch.rand(len(slots), generator=torch.Generator().manual_seed(0)) < slots / num_slots)
    counts = counts_of(guided, draws)
    expected = kernel(guided.table.rates(), guided.options).numpy() * draws
    assert expected.max() > 5 * expected.min()
    assert stats.chisquare(counts, expected).pvalue > 1e-3
    assert stats.chisquare(counts).pvalue < 1e-9  # so that the test above means something
    assert stats.chisquare(counts_of(make(Uniform, UniformOptions(), draws, num_slots, seed=3), draws)).pvalue > 1e-3


def test_draw_stays_within_the_slots_and_skips_those_without_mass():
    u = torch.tensor([0.0, 0.25, 0.5, 1 - 2**-53, 1.0], dtype=torch.float64)

    def drawn(*probabilities):
        return draw(cumulate(torch.tensor(probabilities, dtype=torch.float64)), u).tolist()

    assert drawn(0.0, 0.5, 0.0, 0.5) == [1, 1, 3, 3, 3]
    assert drawn(0.5, 0.5, 0.0) == [0, 0, 1, 1, 1]
    assert drawn(1.0) == [0] * 5
    assert sum([0.1] * 10) < 1 and drawn(*[0.1] * 10)[-2:] == [9, 9]  # rounding
    assert drawn(*[0.3, 0.3, 0.4 + 1e-9])[-2:] == [2, 2]


def test_rescored_only_after_a_record():
    sampler = make(SuccessGuided, SuccessGuidedOptions())
    sampler.sample()
    before = sampler.probabilities
    sampler.sample()
    assert sampler.probabilities is before
    record(sampler, [0, 0, 1], [True, False, False])
    sampler.sample()
    # 1 of 2, 0 of 1, and three never seen, which count as unsolved
    expected = kernel(torch.tensor([0.5, 0.0, 0.0, 0.0, 0.0]), SuccessGuidedOptions())
    torch.testing.assert_close(sampler.probabilities, expected, rtol=1e-12, atol=0)


def test_rate_by_history_counts_missing_outcomes_as_failures():
    sampler = make(SuccessGuided, SuccessGuidedOptions(history=8, divide_by="history"), num_slots=2)
    record(sampler, [0, 0, 0], [True, True, False])
    assert sampler.table.rates().tolist() == [0.25, 0.0]


def test_metrics_by_hand():
    tags = torch.tensor([0, 0, 1, 1, 1])
    difficulty = torch.tensor([1.0, 2.0, 2.9, 3.1, 11.0]).double()  # ranges of 2: 1 to 3, 3 to 5, ... 9 to 11
    table = OutcomeTable(make_slots(5, tags=tags, names=("near", "far"), difficulty=difficulty), 10)
    yes = torch.ones(15, dtype=torch.bool)
    slots = zeros(15)
    slots[10:] = 1
    table.record(slots, torch.arange(15) % 10 < 6, yes)  # slot 0: 6 of 10, slot 1: 5 of 5
    table.record(torch.tensor([2, 2, -1]), torch.tensor([True, False, True]), yes[:3])
    table.record(torch.tensor([2, 0]), torch.tensor([False, True]), torch.tensor([True, False]))  # slot 2: 1 of 3
    m = {k: v.item() for k, v in table.metrics(torch.tensor([0.5, 0.125, 0.125, 0.125, 0.125]).double()).items()}
    assert [m[f"p_hist_{i}"] for i in range(5)] == pytest.approx([0, 1 / 3, 0, 1 / 3, 1 / 3])
    assert [m[f"mass_hist_{i}"] for i in range(5)] == pytest.approx([0.25, 0.125, 0, 0.5, 0.125])
    assert (m["success/near"], m["success/far"]) == pytest.approx((0.8, 1 / 3))
    assert (m["mass/near"], m["mass/far"]) == pytest.approx((0.625, 0.375))
    assert [m[f"success_by_difficulty_{i}"] for i in range(5)] == pytest.approx([(0.6 + 1 + 1 / 3) / 3, 0, 0, 0, 0])
    assert m["difficulty"] == pytest.approx(0.5 * 1 + 0.125 * (2 + 2.9 + 3.1 + 11))
    assert m["visited_fraction"] == pytest.approx(0.6)
    assert m["effective_sample_size"] == pytest.approx(math.exp(0.5 * math.log(2) + 4 * 0.125 * math.log(8)))
    assert m["max_min_ratio"] == 4
    assert (m["age_p50"], m["age_p99"]) == (2, 3)  # ages 2 2 0 3 3
    assert m["forgotten"] == 0


@pytest.mark.parametrize(("cls", "options"), SAMPLERS)
def test_metrics_are_scalars_that_later_records_leave_alone(cls, options):
    sampler = make(cls, options())
    record(sampler, [0] * 50, [True] * 50)
    metrics = sampler.metrics()
    assert all(v.shape == () and v.dtype == torch.float32 for v in metrics.values())
    assert all(v.isfinite() for name, v in metrics.items() if name != "max_min_ratio")
    assert sum(metrics[f"mass_hist_{i}"] for i in range(5)).item() == pytest.approx(1, abs=1e-6)
    record(sampler, [0] * 50, [False] * 50)
    assert (metrics["forgotten"].item(), sampler.metrics()["forgotten"].item()) == (0, 1)


@pytest.mark.parametrize(("cls", "options"), SAMPLERS)
def test_checkpoint_gives_bit_equal_draws(cls, options):
    sampler, other = make(cls, options(), seed=1), make(cls, options(), seed=2)
    generator = torch.Generator().manual_seed(0)

    def go_on(s, slots, success):
        record(s, slots, success)
        return s.sample()

    for _ in range(5):
        go_on(sampler, sampler.sample(), torch.rand(8, generator=generator) < 0.5)
    assert not torch.equal(torch.stack([sampler.sample() for _ in range(4)]), torch.stack([other.sample() for _ in range(4)]))
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    kept = sampler.state_dict()
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(5):
        success = torch.rand(8, generator=generator) < 0.5
        slots = sampler.sample()
        assert torch.equal(slots, other.sample())
        assert torch.equal(go_on(sampler, slots, success), go_on(other, slots, success))
    assert {k: v.item() for k, v in sampler.metrics().items()} == {k: v.item() for k, v in other.metrics().items()}
    assert kept["visits"].sum() == 40 and sampler.table.visits[:-1].sum() == 80  # the state is a copy


@pytest.mark.parametrize(("cls", "options"), SAMPLERS)
@pytest.mark.parametrize(("change", "what"), [({"bank_hash": "b2"}, "bank b2"), ({"num_slots": 6}, "6 slots"), ({}, "x 7")])
def test_table_of_another_bank_is_refused(cls, options, change, what):
    foreign = make(cls, options() if change else options(history=7), **change)
    record(foreign, [0, 1], [True, True])
    sampler = make(cls, options())
    before = sampler.state_dict()
    with pytest.raises(BadInput, match=what):
        sampler.load_state_dict(foreign.state_dict())
    after = sampler.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before if k != "bank_hash")


@pytest.mark.parametrize(("cls", "options"), GUIDED)
@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("history", [1, 50])
@pytest.mark.parametrize("outcome", [False, True])
def test_extremes(cls, options, num_slots, history, outcome):
    sampler = make(cls, options(history=history), num_slots=num_slots)
    for _ in range(60):
        slots = sampler.sample()
        assert slots.min() >= 0 and slots.max() < num_slots
        record(sampler, slots, [outcome] * 8)
    assert sampler.table.rates().tolist() == [float(outcome)] * num_slots
    metrics = sampler.metrics()
    assert all(v.isfinite() for v in metrics.values())
    assert metrics["max_min_ratio"] == 1
    assert metrics["effective_sample_size"].item() == pytest.approx(num_slots, rel=1e-6)
    assert metrics["mass_hist_4" if outcome else "mass_hist_0"].item() == pytest.approx(1)


BAD = {
    "history": [0, 1001], "target": [0.0, 1.0], "kappa": [0.0], "temperature": [-1.0, math.nan], "floor": [0.0],
    "divide_by": ["visit"], "max_age": [0], "quarantine": [0], "uniform_fraction": [-0.1, 1.1, math.nan],
}  # fmt: skip


@pytest.mark.parametrize(("option", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_options_out_of_range_are_refused(option, value):
    with pytest.raises(BadInput, match=f"sampler.{option} must be"):
        make(SuccessGuided, SuccessGuidedOptions(**{option: value}))


@pytest.mark.parametrize("tags", [torch.tensor([0, 0, 1]), torch.tensor([0, 0, -1]), torch.zeros(3, 1, dtype=torch.int64)])
def test_tags_that_do_not_fit_are_refused(tags):
    with pytest.raises(BadInput, match="tags must be a row of indices below 1"):
        make_slots(3, tags=tags)


@pytest.mark.parametrize("difficulty", [[0.0, 1.0], [0.0, 1.0, math.nan]])
def test_difficulties_that_do_not_fit_are_refused(difficulty):
    with pytest.raises(BadInput, match="difficulties must be 3 finite numbers"):
        make_slots(3, difficulty=torch.tensor(difficulty))


def test_an_empty_bank_is_refused():
    with pytest.raises(BadInput, match="at least 1"):
        make(Uniform, UniformOptions(), num_slots=0)
