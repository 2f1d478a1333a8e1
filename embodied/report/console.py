"""Progress of a training run: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import datetime
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

REFRESH_PER_S = 2.0
BAR_WIDTH = 60  # leaves room for the ^C that a terminal echoes at its end, which would wrap and spoil the display
RATE_ROWS = 20  # iterations that the recent speed is taken over
TREND_EVALUATIONS = 5  # evaluations that the trend of success is taken over
EDGE = 0.005  # success rates nearer to 0 or 1 than this count as this near: their logit would be infinite


@dataclass
class Estimate:
    """How far a run is and how long it still takes, from the rows seen so far.

    Bounds are those of `budget`; None: no such bound.
    """

    iterations: int | None = None
    env_steps: int | None = None
    minutes: float | None = None
    target_success: float | None = None
    _recent: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=RATE_ROWS))
    _trend: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=TREND_EVALUATIONS))

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a metrics row into account: wall_s, iteration, env_steps, and eval/success if it has one."""
        self._recent.append((row["wall_s"], row["iteration"], row["env_steps"]))
        success = row.get("eval/success")
        if success is not None:
            self._trend.append((row["wall_s"], success))

    def fraction(self) -> float:
        """How far the run is, in [0, 1]: along the budget or towards the target, whichever is further."""
        if not self._recent:
            return 0.0
        wall_s, iteration, env_steps = self._recent[-1]
        parts = [0.0]
        if self.iterations:
            parts.append(iteration / self.iterations)
        if self.env_steps:
            parts.append(env_steps / self.env_steps)
        if self.minutes:
            parts.append(wall_s / (60 * self.minutes))
        if self.target_success and self._trend:
            parts.append(self._trend[-1][1] / self.target_success)
        return min(max(parts), 1.0)

    def left(self) -> tuple[float, str] | None:
        """Seconds from the last row on and what they lead to ('target' or 'budget'), the sooner; None: unknown."""
        known = [(s, what) for s, what in ((self._target_s(), "target"), (self._budget_s(), "budget")) if s is not None]
        return min(known, default=None)

    def _target_s(self) -> float | None:
        """Time to the target by a straight line through the logits of the last evaluations against time.

        Only fresh-start evaluations count: a sampler that follows the frontier keeps training success near one half.
        """
        if self.target_success is None or len(self._trend) < 3:
            return None
        times = [t for t, _ in self._trend]
        logits = [_logit(p) for _, p in self._trend]
        t_mean, y_mean = sum(times) / len(times), sum(logits) / len(logits)
        spread = sum((t - t_mean) ** 2 for t in times)
        slope = sum((t - t_mean) * (y - y_mean) for t, y in zip(times, logits, strict=True)) / spread if spread else 0.0
        if slope <= 0.0:
            return None
        left = t_mean + (_logit(self.target_success) - y_mean) / slope - self._recent[-1][0]
        return left if left > 0.0 else None  # the line has crossed the target, the policy has not

    def _budget_s(self) -> float | None:
        if not self._recent:
            return None
        (t0, i0, s0), (t1, i1, s1) = self._recent[0], self._recent[-1]
        lefts = [60 * self.minutes - t1] if self.minutes is not None else []
        if self.iterations is not None and i1 > i0:
            lefts.append((self.iterations - i1) * (t1 - t0) / (i1 - i0))
        if self.env_steps is not None and s1 > s0:
            lefts.append((self.env_steps - s1) * (t1 - t0) / (s1 - s0))
        return max(min(lefts), 0.0) if lefts else None


class Progress:
    """Shows a run's progress: `with Progress(...) as progress: progress.update(row)`.

    On a terminal a bar and a few figures are kept up to date in place; elsewhere a line is printed at most every
    `line_every_s` seconds (and one for the last row at the end), without control characters. Ctrl-C is left alone.

    Args:
        iterations, env_steps, minutes, target_success: the run's budget; None: no such bound.
        line_every_s: seconds between plain lines.
    """

    def __init__(
        self,
        iterations: int | None = None,
        env_steps: int | None = None,
        minutes: float | None = None,
        target_success: float | None = None,
        line_every_s: float = 10.0,
    ) -> None:
        self._estimate = Estimate(iterations, env_steps, minutes, target_success)
        self._line_every_s = line_every_s
        self._row: Mapping[str, Any] | None = None
        self._updated = 0.0
        self._evaluated: float | None = None
        self._printed = -math.inf
        self._unprinted = False
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.live import Live

            console = Console(force_terminal=True, highlight=False)
            self._live = Live(console=console, refresh_per_second=REFRESH_PER_S, get_renderable=self._render)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
        elif self._unprinted:
            self._print_line()

    def update(self, row: Mapping[str, Any]) -> None:
        """Show a metrics row: iteration, env_steps, wall_s; success_rate, steps_per_s, eval/success if it has them."""
        self._estimate.add(row)
        if row.get("eval/success") is not None:
            self._evaluated = row["eval/success"]
        self._row, self._updated = row, time.monotonic()
        self._unprinted = True
        if self._live is None and time.monotonic() - self._printed >= self._line_every_s:
            self._print_line()

    def message(self, text: str) -> None:
        """Print a line that stays, above the bar if there is one."""
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def _print_line(self) -> None:
        print("  ".join(self._lines(since_s=0.0)), flush=True)
        self._printed = time.monotonic()
        self._unprinted = False

    def _lines(self, since_s: float) -> tuple[str, str]:
        """The figures as two lines of fewer than 80 characters, `since_s` seconds after the last row."""
        row = self._row
        if row is None:
            return "starting", ""
        target, left, speed = self._estimate.target_success, self._estimate.left(), row.get("steps_per_s")
        success = f"success {_percent(row.get('success_rate'))} (evaluated {_percent(self._evaluated)}"
        success += f", target {_percent(target)})" if target is not None else ")"
        left_text = f"left {_clock(max(left[0] - since_s, 0.0))} to {left[1]}" if left else "left -"
        speed_text = f"{speed:,.0f} steps/s" if speed is not None else "- steps/s"
        counts = f"{row['env_steps']:,} steps  iteration {row['iteration']:,}"
        return f"{success}  {left_text}", f"{speed_text}  {counts}  elapsed {_clock(row['wall_s'] + since_s)}"

    def _render(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        since_s = time.monotonic() - self._updated if self._row else 0.0
        fraction = self._estimate.fraction()
        # no fraction to show yet: a moving bar says that something is going on
        bar = ProgressBar(total=1.0, completed=fraction, width=BAR_WIDTH, pulse=self._row is None)
        lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in self._lines(since_s)]
        return Group(*lines, bar)  # a bar does not end its line, so it comes last


def _logit(p: float) -> float:
    p = min(max(p, EDGE), 1.0 - EDGE)
    return math.log(p / (1.0 - p))


def _percent(p: float | None) -> str:
    return "-" if p is None else f"{100 * p:.1f} %"


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
