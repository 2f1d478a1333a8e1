"""`embodied deploy faults`: break the bridge in every way we know of, and measure at the robot what comes of it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from omegaconf import MISSING

from embodied.arguments import read
from embodied.commands.deploy.connect import load_policy
from embodied.deploy.faults.judge import Result, Row, run_row
from embodied.deploy.faults.rows import KILLS, rows
from embodied.deploy.pace import machine_load
from embodied.runs import check_new
from embodied.spec.errors import BadInput, nearest

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow", "running": "cyan"}


@dataclass
class FaultsOptions:
    """Options of `embodied deploy faults`."""

    policy: str = MISSING  # an exported file, or the folder of a run that was exported
    rows: list[str] = field(default_factory=list)  # names; empty: all
    seed: int = 0  # of scenes, moments and chance
    kills: int = KILLS  # of everything, in torn_journal_kill
    out: str | None = None  # folder, must be new


def run(words: list[str]) -> int:
    """Play the rows one after another; the last line is JSON."""
    # on a command line a,b would be a sweep
    words = [f"rows=[{word[5:]}]" if word.startswith("rows=") and not word.startswith("rows=[") else word for word in words]
    options = read("deploy faults", FaultsOptions, words)
    if options.kills < 1:
        raise BadInput(f"kills={options.kills}: expected 1 or more")
    if options.seed < 0:
        raise BadInput(f"seed={options.seed}: expected 0 or more")
    policy = load_policy(options.policy)
    table = _chosen(rows(policy.spec, options.kills), options.rows)
    out = Path(options.out or f"runs/faults/{datetime.now():%Y%m%d-%H%M%S}").expanduser()
    check_new(out)
    out.mkdir(parents=True)
    file = Path(options.policy).expanduser()
    file = (file / "policy.onnx" if file.is_dir() else file).absolute()
    about = {
        "policy": str(file),
        "policy_sha256": policy.sha256,
        "robot": policy.spec.robot.name,
        "task": policy.spec.task,
        "seed": options.seed,
        "machine": machine_load(),
    }
    results: list[Result] = []
    with _display(len(table)) as display:
        for row in table.values():
            display.began(row)
            results.append(run_row(row, file, policy.spec, out.absolute() / row.name, options.seed))
            display.ended(results[-1])
            # after every row: Ctrl-C loses none
            report = {**about, "rows": [asdict(result) for result in results]}
            (out / "faults.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{out / 'faults.json'}: what was measured; the logs of each row are beside it")
    print(json.dumps(summary(results)), flush=True)
    return int(any(result.outcome == "failed" for result in results))


def summary(results: list[Result]) -> dict[str, Any]:
    """What the last line says."""
    names = {outcome: [r.name for r in results if r.outcome == outcome] for outcome in ("passed", "failed", "not run")}
    return {"rows": len(results), "passed": len(names["passed"]), "failed": names["failed"], "not_run": names["not run"]}


def _chosen(table: dict[str, Row], names: list[str]) -> dict[str, Row]:
    """The rows of these names, in the table's order; all if none is given.

    Raises:
        BadInput: there is no such row; the nearest is named.
    """
    for name in names:
        if name not in table:
            raise BadInput(f"rows={name}: there is no such row: {nearest(name, table)}")
    return {name: row for name, row in table.items() if name in names or not names}


# -- on the screen -------------------------------------------------------------------------------------------------------


class _Display(Protocol):
    def began(self, row: Row) -> None: ...

    def ended(self, result: Result) -> None: ...


class _Lines:
    """A line a row, without control characters."""

    def began(self, row: Row) -> None:
        pass

    def ended(self, result: Result) -> None:
        print(f"{result.outcome:<7} {result.name}: {_figures(result)} ({result.wall_s:.1f} s)", flush=True)
        for line in result.why:
            print(f"        {line}", flush=True)


class _Live:
    """A table in place: the rows that fit, the one that runs last; all of them when it is left."""

    def __init__(self, console: Console, live: Live, count: int) -> None:
        self._console, self._live, self._count = console, live, count
        self._results: list[Result] = []

    def began(self, row: Row) -> None:
        # drawn between rows only: while a row runs nothing here wants the processor
        fitting = max(2, self._console.height // 2 - 3)
        self._live.update(self.table(self._results[-fitting:], row), refresh=True)

    def ended(self, result: Result) -> None:
        self._results.append(result)

    def table(self, results: list[Result] | None = None, running: Row | None = None) -> Table:
        from rich.markup import escape
        from rich.table import Table

        table = Table("fault", "while", "outcome", "measured at the robot", title=f"{len(self._results)} of {self._count} rows")
        for result in self._results if results is None else results:
            style = STYLES[result.outcome]
            told = "\n".join([_figures(result), *result.why])
            table.add_row(result.name, result.phase, f"[{style}]{result.outcome}[/]", escape(told))
        if running is not None:
            table.add_row(running.name, running.phase, f"[{STYLES['running']}]running[/]", escape(running.what))
        return table


@contextlib.contextmanager
def _display(count: int) -> Iterator[_Display]:
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        yield _Lines()
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        shown = _Live(console, live, count)
        yield shown
    console.print(shown.table())


def _figures(result: Result) -> str:
    """The figures that decide, of a row that was played."""
    measured = result.measured
    if not measured:
        return result.injected
    names = {"target still after": "moved", "stopped by itself after": "stopped", "at rest after": "rested"}
    figures = {what: measured[name] for what, name in names.items() if measured[name] is not None}
    # where it was at rest before, its watchdog only ended an episode that was over
    told = [f"{what} {1e3 * at:.0f} ms" for what, at in figures.items() if at <= figures.get("at rest after", at)]
    return ", ".join(told) if told else "nothing moved"
