"""What the samplers' tests share."""

from __future__ import annotations

import torch
import yaml

from embodied.keys import presets
from embodied.sim.samplers.slots import Slots
from embodied.sim.samplers.success_guided import logits

PRESETS = {name: yaml.safe_load(path.read_text()) for name, path in presets("sampler").items()}
for values in PRESETS.values():
    assert values.pop("name") == "success_guided"


def make_slots(num_slots=5, num_worlds=8, bank_hash="bank", seed=0, tags=None, names=("all",), difficulty=None):
    tags = torch.zeros(num_slots, dtype=torch.int64) if tags is None else tags
    difficulty = torch.arange(num_slots, dtype=torch.float64) if difficulty is None else difficulty
    return Slots(num_worlds, tags, names, difficulty, bank_hash, seed, torch.device("cpu"))


def make(cls, options, num_worlds=8, num_slots=5, **changes):
    return cls(options, make_slots(num_slots, num_worlds, **changes))


def record(sampler, slots, success):
    """As an environment does: a row for every world, most of which did not end."""
    worlds = sampler.slots.num_worlds
    for some, came in zip(torch.as_tensor(slots).split(worlds), torch.as_tensor(success).split(worlds), strict=True):
        none = worlds - len(some)
        rows = torch.cat([some, torch.full((none,), -1)])
        outcomes = torch.cat([came, torch.zeros(none, dtype=torch.bool)])
        sampler.record(rows, outcomes, torch.ones(worlds, dtype=torch.bool), torch.zeros(worlds))


def kernel(rates, options):
    """The probabilities of success-guided sampling without answers to failures."""
    return torch.softmax(logits(rates, options), dim=0)
