"""report.html: what a run did, on one page that needs nothing else."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied.report.charts import Axis, Line, heat_map, line_chart, short
from embodied.report.metrics import Row, read_metrics

PATCH_SHOWN = 20_000  # characters of a modified checkout's patch
PERCENT = Axis("", percent=True)


def write_page(run_dir: Path) -> Path:
    """Write report.html into a run's folder.

    It is made from config.yaml, metrics.jsonl, eval.json and environment.json, says which of them are missing, and is
    self-contained.

    Returns:
        Its path.

    Raises:
        Fault: metrics.jsonl has a damaged line.
    """
    from importlib.resources import files

    import jinja2

    run_dir = Path(run_dir)
    template = (files("embodied.report") / "page.html.j2").read_text(encoding="utf-8")
    engine = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = engine.from_string(template).render(_content(run_dir))
    path = run_dir / "report.html"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)  # a browser that reloads never sees half a page
    return path


def _content(run_dir: Path) -> dict[str, Any]:
    """Everything the template shows."""
    config_text = _text(run_dir / "config.yaml")
    metrics_path = run_dir / "metrics.jsonl"
    rows = read_metrics(metrics_path) if metrics_path.exists() else []
    not_finite = sum(value is None for row in rows for value in row.values())
    evaluation = _json(run_dir / "eval.json")
    environment = _json(run_dir / "environment.json")
    target = _target(config_text)
    steps, walls = [row["env_steps"] for row in rows], _walls(rows)
    health = _health(rows)
    return {
        "name": run_dir.resolve().name,
        "task": evaluation.get("task") if evaluation else None,
        "last": rows[-1] if rows else None,
        "wall_s": walls[-1] if walls else None,
        "evaluation": evaluation,
        "evaluated": next((row for row in reversed(rows) if row.get("eval/success") is not None), None),
        "target": target,
        "learning": _learning(rows, steps, walls, target),
        "resets": _resets(rows, steps),
        "losses": _each(rows, steps, "loss/"),
        "not_finite": not_finite,
        "health": health,
        "invalid": _invalid(health),
        "config": config_text,
        "environment": _flat(environment) if environment else None,
        "patch_shown": PATCH_SHOWN,
        "flat": _flat,
        "duration": _duration,
        "short": short,
    }


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _target(config_text: str | None) -> float | None:
    """budget.target_success of the configuration, if it has one."""
    from omegaconf import OmegaConf

    return OmegaConf.select(OmegaConf.create(config_text), "budget.target_success") if config_text else None


def _walls(rows: Sequence[Row]) -> list[float]:
    """Training time at each row; a resumed process counts from its own start again, so what came before is added."""
    walls: list[float] = []
    before = previous = 0.0
    for row in rows:
        if row["wall_s"] < previous:
            before += previous
        previous = row["wall_s"]
        walls.append(before + previous)
    return walls


def _line(rows: Sequence[Row], xs: Sequence[float], key: str, name: str, marked: bool = False) -> Line:
    points = [(x, row[key]) for x, row in zip(xs, rows, strict=True) if row.get(key) is not None]
    return Line(name, points, marked)


def _learning(rows: Sequence[Row], steps: Sequence[float], walls: Sequence[float], target: float | None) -> list[str]:
    """Charts of success against experience and against time, then of return and episode length."""
    charts = []
    for title, xs, axis in (
        ("Success against experience", steps, Axis("environment steps")),
        ("Success against time", walls, _time_axis(walls)),
    ):
        lines = [
            _line(rows, xs, "success_rate", "training"),
            _line(rows, xs, "eval/success", "fresh starts", marked=True),
        ]
        charts.append(line_chart(title, lines, axis, PERCENT, level=target))
    for key, title in (("return_mean", "Return of an episode"), ("episode_length", "Steps of an episode")):
        charts.append(line_chart(title, [_line(rows, steps, key, "last")], Axis("environment steps"), Axis("")))
    return [chart for chart in charts if chart]


def _time_axis(walls: Sequence[float]) -> Axis:
    longest = walls[-1] if walls else 0.0
    if longest < 180:
        return Axis("seconds")
    return Axis("minutes", 60.0) if longest < 3 * 3600 else Axis("hours", 3600.0)


def _resets(rows: Sequence[Row], steps: Sequence[float]) -> list[str]:
    """Charts of what the reset sampler did."""
    axis = Axis("environment steps")
    charts = []
    for prefix, title in (
        ("sampler/p_hist_", "Reset configurations by their success rate (%)"),
        ("sampler/mass_hist_", "Resets drawn by success rate of their configuration (%)"),
    ):
        keys = sorted(_keys(rows, prefix), key=lambda key: int(key.removeprefix(prefix)))
        edges = [f"{100 * i / len(keys):.0f}" for i in range(len(keys) + 1)] if keys else []
        labels = [f"{low}-{high}" for low, high in itertools.pairwise(edges)]
        columns = [
            (x, [row[key] or 0.0 for key in keys])
            for x, row in zip(steps, rows, strict=True)
            if keys and all(key in row for key in keys)
        ]
        charts.append(heat_map(title, columns, labels, axis))
    for prefix, title in (("sampler/success/", "Success by tag"), ("sampler/mass/", "Resets drawn by tag")):
        lines = [_line(rows, steps, key, key.removeprefix(prefix)) for key in _keys(rows, prefix)]
        charts.append(line_chart(title, lines, axis, PERCENT))
    return [chart for chart in charts if chart]


def _each(rows: Sequence[Row], steps: Sequence[float], prefix: str) -> list[str]:
    """One chart for each metric that begins with `prefix`."""
    charts = [
        line_chart(key.removeprefix(prefix), [_line(rows, steps, key, "last")], Axis("environment steps"), Axis(""))
        for key in _keys(rows, prefix)
    ]
    return [chart for chart in charts if chart]


def _keys(rows: Sequence[Row], prefix: str) -> list[str]:
    """Names that begin with `prefix` in any row, in order of appearance."""
    return list(dict.fromkeys(key for row in rows for key in row if key.startswith(prefix)))


def _health(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of each health counter: its total, and in how many iterations it counted something or was not finite.

    A name that ends in `_total` counts since the run began, another one counts afresh each iteration.
    """
    table = []
    for key in _keys(rows, "health/"):
        values = [row[key] for row in rows if key in row]
        if key.endswith("_total"):
            steps = zip([0.0, *values], values, strict=False)
            counts = [None if before is None or now is None else now - before for before, now in steps]
        else:
            counts = values
        raised = sum(count is None or count > 0 for count in counts)
        total = sum(count for count in counts if count is not None)
        table.append({"name": key.removeprefix("health/").removesuffix("_total"), "total": total, "raised": raised})
    return table


def _invalid(health: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The counters that say a world became invalid in training; empty: none did, None: not recorded."""
    counters = [counter for counter in health if "invalid" in counter["name"]] or health
    return [counter for counter in counters if counter["raised"]] if counters else None


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested plain data as one level of text: {"a": {"b": [1, 2]}} is {"a b": "1, 2"}."""
    flat: dict[str, str] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key} ")
        elif value not in (None, []):
            items = value if isinstance(value, list) else [value]
            flat[prefix + key] = ", ".join(f"{item:.4g}" if isinstance(item, float) else str(item) for item in items)
    return flat


def _duration(seconds: float) -> str:
    """42 s, 7.5 min or 3.2 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"
