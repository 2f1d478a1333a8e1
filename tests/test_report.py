import html.parser
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from test_metrics import row

from embodied.report import charts, environment
from embodied.report.charts import Axis, Line
from embodied.report.page import write_page
from embodied.report.statistics import wilson

SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)


def run_python(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **options)


def test_importing_loads_nothing_heavy():
    modules = ("metrics", "console", "page", "statistics", "environment", "recording")
    code = "import sys\n" + "".join(f"import embodied.report.{name}\n" for name in modules)
    code += "print(sorted(set(sys.modules) & {'matplotlib', 'tensorboard', 'rerun', 'av', 'jinja2', 'torch', 'scipy',"
    code += " 'rich', 'psutil', 'omegaconf'}))"
    done = run_python(code)
    assert done.stdout.strip() == "[]", done.stderr


# statistics


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_published_values(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.999))
def test_wilson_agrees_with_scipy(counts, confidence):
    theirs = binomtest(*counts).proportion_ci(confidence, method="wilson")
    assert wilson(*counts, confidence) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_wilson_edges():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(50, 50)[1] == 1.0
    for wrong in ((3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="outside"):
            wilson(*wrong)


# charts and page


class Balanced(html.parser.HTMLParser):
    """Fails on unbalanced tags; keeps the text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def words(page):
    return " ".join("".join(Balanced(page).text).split())


def numbers(path):
    return [float(x) for x in re.findall(r"-?\d+\.?\d*", path)]


def test_a_line_runs_where_its_points_are():
    chart = charts.line_chart("t", [Line("a & b", [(0, 0.0), (500, 0.5), (1000, 1.0)])], Axis("x"), Axis("", percent=True))
    svg = ElementTree.fromstring(SVG.search(chart)[0])
    _, _, width, height = numbers(svg.get("viewBox"))
    (curve,) = [e for e in svg.iter("path") if "line" in e.get("class").split()]
    x0, y0, x1, y1, x2, y2 = numbers(curve.get("d"))
    assert 0 < x0 < x2 < width
    assert 0 < y2 < y0 < height
    assert (x1, y1) == (pytest.approx((x0 + x2) / 2, abs=0.1), pytest.approx((y0 + y2) / 2, abs=0.1))
    places = {e.text: (float(e.get("x")), float(e.get("y"))) for e in svg.iter("text")}
    assert places["0 %"][1] - places["100 %"][1] == pytest.approx(y0 - y2, abs=0.1)
    assert "a &amp; b <b>100.0 %</b>" in chart


def test_a_heat_map_shades_by_share_and_stacks_upwards():
    columns = [(10.0, (3.0, 1.0)), (20.0, (0.0, 5.0)), (30.0, (0.0, 0.0))]
    svg = ElementTree.fromstring(SVG.search(charts.heat_map("t", columns, ("low", "high"), Axis("x")))[0])
    cells = {e.get("style"): e.get("d") for e in svg.iter("path") if e.get("class") == "cell"}
    assert set(cells) == {"--share:75%", "--share:25%", "--share:100%"}
    top, height = (numbers(cells["--share:25%"])[i] for i in (1, 3))
    x, bottom, width, _, _ = numbers(cells["--share:75%"])
    assert bottom == pytest.approx(top + height, abs=0.1)
    assert numbers(cells["--share:100%"])[:2] == [pytest.approx(x + width, abs=1.0), top]
    labels = {e.text: float(e.get("y")) for e in svg.iter("text")}
    assert labels["low"] > labels["high"]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_and_within_the_axis(low, span):
    high = low + max(span, abs(low) * 1e-6)
    ticks = charts.ticks(low, high, 4)
    assert 1 <= len(ticks) <= 6
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    if len(ticks) > 1:
        digits = f"{ticks[1] - ticks[0]:.3e}"
        assert digits[:5] in ("1.000", "2.000", "5.000"), digits


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=2000))
def test_thinning_keeps_the_mean(values):
    points = charts.thin(list(enumerate(values)))
    assert len(points) <= charts.MAX_POINTS
    if len(values) % math.ceil(len(values) / charts.MAX_POINTS) == 0:  # groups of one size
        assert np.mean([y for _, y in points]) == pytest.approx(np.mean(values), abs=1e-9)


@pytest.mark.parametrize(
    ("value", "text"), [(5242880, "5.24M"), (1000, "1k"), (0.25, "0.25"), (3e-4, "3e-4"), (0, "0"), (-2e9, "-2G")]
)
def test_short_numbers(value, text):
    assert charts.short(value) == text


def fake_rows(n):
    for i in range(1, n + 1):
        done = i / n
        yield row(i) | {
            "success_rate": done,
            "return_mean": 5 * done,
            "episode_length": 90.0,
            **{f"sampler/p_hist_{k}": 0.2 for k in range(5)},
            **{f"sampler/mass_hist_{k}": 0.2 for k in range(5)},
            "sampler/success/on the table": done,
            "sampler/mass/on the table": 1.0,
            "loss/value": None if i == 3 else 1 - done,
            "health/invalid_total": 0,
            **({"eval/success": done} if i % 5 == 0 else {}),
        }


def fake_run(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    low, high = wilson(473, 500)
    evaluation = {"task": "assembly", "episodes": 500, "success_once": 0.946, "ci95": [low, high], "invalid": 0}
    (folder / "eval.json").write_text(json.dumps(evaluation))
    (folder / "config.yaml").write_text("budget:\n  target_success: 0.93\nname: <script>alert(1)</script>\n")
    (folder / "environment.json").write_text(json.dumps(environment.describe()))


def test_the_page_shows_a_run(tmp_path):
    fake_run(tmp_path, fake_rows(20))
    page = write_page(tmp_path).read_text()
    text = words(page)
    assert "94.6 %" in text
    assert "95 % Wilson interval 92.3 % to 96.3 %, 500 episodes" in text
    assert "target 93.0 %" in text
    assert "No invalid world occurred in training." in text
    assert "Final evaluation: no invalid episodes." in text
    assert "1 metric value was not finite" in text
    assert "on the table 100.0 %" in text
    assert "fresh starts 100.0 %" in text
    assert f"packages mujoco{environment.describe()['packages']['mujoco']}" in text
    assert "<script" not in page
    pictures = SVG.findall(page)
    assert len(pictures) == 4 + 4 + 1
    for picture in pictures:
        ElementTree.fromstring(picture)


def test_the_page_needs_nothing_else(tmp_path):
    fake_run(tmp_path, fake_rows(20))
    page = write_page(tmp_path).read_text()
    assert not re.search(r"https?://|\bsrc=|\bhref=|url\(|@import|<link", page)
    assert len(page) < 200_000


def test_a_long_run_makes_no_long_page(tmp_path):
    fake_run(tmp_path, fake_rows(5000))
    assert write_page(tmp_path).stat().st_size < 300_000


def test_the_page_of_an_empty_folder_says_what_is_missing(tmp_path):
    text = words(write_page(tmp_path).read_text())
    for name in ("config.yaml", "metrics.jsonl", "eval.json", "environment.json"):
        assert f"{name} is not there" in text
    assert "invalid worlds: not recorded" in text


@pytest.mark.parametrize("present", ["config.yaml", "metrics.jsonl", "eval.json", "environment.json"])
def test_the_page_does_with_any_single_file(tmp_path, present):
    fake_run(tmp_path, fake_rows(1))
    for path in tmp_path.iterdir():
        if path.name != present:
            path.unlink()
    text = words(write_page(tmp_path).read_text())
    assert f"{present} is not there" not in text
    assert text.count("is not there") >= 3


def test_the_page_says_that_invalid_worlds_occurred(tmp_path):
    totals = [0, 0, 2, 2, 5, 5]
    fake_run(tmp_path, [row(i, **{"health/invalid_total": total}) for i, total in enumerate(totals, 1)])
    text = words(write_page(tmp_path).read_text())
    assert "Invalid worlds occurred in training: invalid 5 in 2 iterations." in text
    assert "No invalid world" not in text


def test_training_time_adds_up_over_resumed_processes(tmp_path):
    clocks = [60, 120, 180, 50, 100]  # resumed after three minutes
    rows = [{"iteration": i, "env_steps": i, "wall_s": clock, "success_rate": 0.1} for i, clock in enumerate(clocks)]
    fake_run(tmp_path, rows)
    assert "4.7 mintraining time" in words(write_page(tmp_path).read_text())
