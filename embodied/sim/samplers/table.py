"""What came of every reset configuration: the last outcomes of each slot, and what is known from them.

Everything is a dense tensor operation on the table's device: nothing is read back, and but for a CPU no shape depends on data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embodied.sim.samplers.slots import Slots
from embodied.spec.errors import BadInput

BINS = 5
MASTERED, UNSOLVED = 0.9, 0.5  # a slot that reached the first and fell to the second is forgotten
LONGEST = 1000  # history: tables of every rate that a slot can have stay small
MIN_OUTCOMES = 10  # fewer outcomes than these (or than the history holds) do not make a slot mastered


def check_history(history: int, divide_by: str = "visits") -> None:
    """Refuse a history that no table could keep.

    Raises:
        BadInput: it is shorter than 1 or longer than `LONGEST`, or an unknown way of dividing.
    """
    if not 1 <= history <= LONGEST:
        raise BadInput(f"sampler.history must be from 1 to {LONGEST}, got {history}")
    if divide_by not in ("visits", "history"):
        raise BadInput(f"sampler.divide_by must be 'visits' or 'history', got '{divide_by}'")


class OutcomeTable:
    """Ring buffers of the last `history` Boolean outcomes of `num_slots` reset configurations.

    Row `num_slots` of every buffer is a bin: what must not be recorded is written there, so that shapes stay fixed. A
    slot's write position is its visits modulo `history`, the outcomes it holds are the lesser of visits and `history`,
    and unused places are 0: visits and sums are all that is kept beside the outcomes.

    Args:
        slots: the reset configurations.
        history: outcomes kept of each.
        divide_by: what a slot's success rate is relative to: its recorded outcomes ("visits") or `history`.

    Raises:
        BadInput: no history that a table could keep.
    """

    def __init__(self, slots: Slots, history: int, divide_by: str = "visits") -> None:
        check_history(history, divide_by)
        num_slots, device = slots.num_slots, slots.device
        self.num_slots, self.history, self.bank_hash, self.divide_by = num_slots, history, slots.bank_hash, divide_by
        self.tags, self.tag_names = slots.tags.to(device), list(slots.tag_names)
        self.difficulty = slots.difficulty.to(device, torch.float64)
        low, high = self.difficulty.aminmax()
        self.difficulty_bin = (BINS * (self.difficulty - low) / (high - low).clamp(min=1e-12)).long().clamp(max=BINS - 1)
        # few worlds end in a step, and a CPU need not avoid shapes that depend on data
        self.compact = device.type == "cpu"
        rows = num_slots + 1
        self.outcomes = torch.zeros(rows, history, dtype=torch.uint8, device=device)
        self.visits = torch.zeros(rows, dtype=torch.int64, device=device)
        self.sums = torch.zeros(rows, dtype=torch.int64, device=device)
        self.last_record = torch.zeros(rows, dtype=torch.int64, device=device)  # value of `records` then; 0: never
        self.best = torch.zeros(rows, dtype=torch.float64, device=device)  # highest rate since last forgotten
        self.records = torch.zeros((), dtype=torch.int64, device=device)
        self.forgotten = torch.zeros((), dtype=torch.int64, device=device)

    def record(self, slots: Tensor, success: Tensor, valid: Tensor, calls: int = 1) -> None:
        """Add outcomes in the order given; a slot may occur several times.

        Args:
            slots: int64 [M]; below 0: record nothing.
            success: bool [M].
            valid: bool [M]; False: record nothing.
            calls: how many calls these are the outcomes of; ages count calls.
        """
        rows = slots.masked_fill(~valid | (slots < 0), self.num_slots)
        if self.compact:
            ids = torch.nonzero(rows < self.num_slots)[:, 0]
            if not len(ids):
                self.records += calls
                return
            rows, success = rows[ids], success[ids]
        rows, order = rows.sort(stable=True)
        first = torch.searchsorted(rows, rows)
        rank = torch.arange(len(rows), device=rows.device) - first  # how many of this call came before in the same slot
        count = torch.searchsorted(rows, rows, right=True) - first

        kept = rows.masked_fill(rank < count - self.history, self.num_slots)  # no place is written twice
        place = (self.visits[rows] + rank) % self.history
        new = success[order].to(torch.uint8)
        self.sums.index_add_(0, kept, new.long() - self.outcomes[kept, place].long())
        self.outcomes[kept, place] = new
        self.visits.index_add_(0, rows, torch.ones_like(rows))
        self.records += calls
        self.last_record[rows] = self.records

        rate, best = self._rate(rows), self.best[rows]
        settled = self.visits[rows] >= min(self.history, MIN_OUTCOMES)
        forgot = (best >= MASTERED) & (rate <= UNSOLVED)
        self.forgotten += (forgot & (rank == 0) & (rows < self.num_slots)).sum()
        self.best[rows] = torch.maximum(best, rate.masked_fill(~settled, 0.0)).masked_fill(forgot, 0.0)

    def _rate(self, rows: Tensor | slice) -> Tensor:
        return self.sums[rows].double() / self._denominator(rows)

    def _denominator(self, rows: Tensor | slice) -> Tensor:
        visits = self.visits[rows]
        return visits.clamp(1, self.history) if self.divide_by == "visits" else torch.full_like(visits, self.history)

    def held(self) -> Tensor:
        """Number of outcomes that every slot's rate is relative to, int64 [num_slots], at least 1."""
        return self._denominator(slice(self.num_slots))

    def ages(self) -> Tensor:
        """`record` calls since every slot's last outcome (since the start if none), int64 [num_slots]."""
        return self.records - self.last_record[: self.num_slots]

    def rates(self) -> Tensor:
        """Success rate of every slot's kept outcomes, float64 [num_slots]; 0 where nothing was recorded."""
        return self._rate(slice(self.num_slots))

    def metrics(self, probabilities: Tensor) -> dict[str, Tensor]:
        """What is known of the slots and how they are drawn, as float32 0-d tensors.

        Bins are [0, .2), [.2, .4), ... [.8, 1] of the success rate. `p_hist_*` are fractions of the slots visited,
        `mass_hist_*` of the sampling mass (slots never visited are in bin 0). `success/*` is the mean over a tag's
        visited slots (0 if none), not over episodes, since short episodes report more often. Ages count `record` calls
        since a slot's last outcome (since the start if none). `forgotten` counts falls from mastered to unsolved.
        `difficulty` is the mean over the sampling mass, `success_by_difficulty_*` the mean success of the slots visited in
        five equal ranges from the least difficulty to the greatest (0 if none). `max_min_ratio` is infinite where a slot
        cannot be drawn.

        Args:
            probabilities: float64 [num_slots], summing to 1.
        """
        real = slice(self.num_slots)
        rates = self.rates()
        visited = (self.visits[real] > 0).double()
        bins = (BINS * self.sums[real] // self._denominator(real)).clamp(max=BINS - 1)  # integers: exact at edges

        def total(values: Tensor, groups: Tensor, size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float64, device=values.device).index_add_(0, groups, values)

        def visited_mean(groups: Tensor, size: int) -> Tensor:
            return total(rates * visited, groups, size) / total(visited, groups, size).clamp(min=1)

        tags = len(self.tag_names)
        p_hist = total(visited, bins, BINS) / visited.sum().clamp(min=1)
        mass_hist = total(probabilities, bins, BINS)
        success = visited_mean(self.tags, tags)
        by_difficulty = visited_mean(self.difficulty_bin, BINS)
        mass = total(probabilities, self.tags, tags)
        age = self.ages().sort().values
        out = {
            **{f"p_hist_{i}": p_hist[i] for i in range(BINS)},
            **{f"mass_hist_{i}": mass_hist[i] for i in range(BINS)},
            **{f"success/{name}": success[i] for i, name in enumerate(self.tag_names)},
            **{f"mass/{name}": mass[i] for i, name in enumerate(self.tag_names)},
            **{f"success_by_difficulty_{i}": by_difficulty[i] for i in range(BINS)},
            "difficulty": (probabilities * self.difficulty).sum(),
            "visited_fraction": visited.mean(),
            "effective_sample_size": torch.exp(-torch.special.xlogy(probabilities, probabilities).sum()),
            "max_min_ratio": probabilities.max() / probabilities.min(),
            "age_p50": age[(self.num_slots - 1) // 2],
            "age_p99": age[99 * (self.num_slots - 1) // 100],
            "forgotten": self.forgotten,
        }
        return {name: value.to(torch.float32) for name, value in out.items()}

    def _state(self) -> dict[str, Tensor]:
        rows = ("outcomes", "visits", "sums", "last_record", "best")
        state = {name: getattr(self, name)[: self.num_slots] for name in rows}
        return {**state, "records": self.records, "forgotten": self.forgotten}

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that was recorded, and the bank's hash."""
        return {"bank_hash": self.bank_hash, **{name: value.clone() for name, value in self._state().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            BadInput: it is of another bank, another number of slots or another history; nothing was changed then.
        """
        if state["bank_hash"] != self.bank_hash:
            raise BadInput(
                f"the sampler's table is of reset bank {state['bank_hash']}, this run's bank is {self.bank_hash}: "
                "resume with the task options and the bank it was made with, or start a new run"
            )
        slots, history = state["outcomes"].shape
        if (slots, history) != (self.num_slots, self.history):
            raise BadInput(
                f"the sampler's table has {slots} slots x {history} outcomes, this run's {self.num_slots} x "
                f"{self.history}: resume with the task and sampler options it was made with, or start a new run"
            )
        for name, value in self._state().items():
            value.copy_(state[name])
