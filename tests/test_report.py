import html.parser
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from embodied.report import charts, environment, recording
from embodied.report.charts import Axis, Line
from embodied.report.console import Estimate
from embodied.report.metrics import MetricsLog, read_metrics, without_times
from embodied.report.page import write_page
from embodied.report.statistics import wilson
from embodied.spec.errors import BadInput, Fault

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


# metrics


def row(iteration, **more):
    return {"iteration": iteration, "env_steps": 100 * iteration, "wall_s": 1.5 * iteration, **more}


def write_rows(folder, rows, resume=None):
    with MetricsLog(folder, resume) as log:
        for each in rows:
            log.write(each)


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_metrics_come_back_from_both_files(tmp_path):
    rows = [
        row(1, **{"loss/value": 0.1, "success_rate": np.float32(0.5), "sampler/forgotten": torch.tensor(3)}),
        row(2, **{"loss/value": math.nan, "success_rate": math.inf, "sampler/forgotten": torch.tensor(-math.inf)}),
    ]
    write_rows(tmp_path, rows)
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        row(1, **{"loss/value": 0.1, "success_rate": 0.5, "sampler/forgotten": 3}),
        row(2, **{"loss/value": None, "success_rate": None, "sampler/forgotten": None}),
    ]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    (first, second) = scalars(tmp_path, "loss/value")
    assert first == (100, pytest.approx(0.1))
    assert second[0] == 200
    assert math.isnan(second[1])


def test_a_new_run_refuses_a_folder_with_metrics(tmp_path):
    write_rows(tmp_path, [row(1)])
    with pytest.raises(BadInput, match="resume="):
        MetricsLog(tmp_path)
    assert read_metrics(tmp_path / "metrics.jsonl") == [row(1)]


def test_resuming_moves_newer_rows_to_the_orphans(tmp_path):
    path, orphans = tmp_path / "metrics.jsonl", tmp_path / "metrics.orphan.jsonl"
    write_rows(tmp_path, [row(i, loss=0.1 * i) for i in range(1, 6)])
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:3])
    with path.open("ab") as file:
        file.write(b'{"iteration": 6, "env_')
    write_rows(tmp_path, [], resume=3)
    assert path.read_bytes() == kept
    torn = {"torn": '{"iteration": 6, "env_'}
    assert read_metrics(orphans) == [row(4, loss=0.4), row(5, loss=0.5), torn]

    write_rows(tmp_path, [row(4, loss=9.0)], resume=3)
    write_rows(tmp_path, [row(4, loss=7.0)], resume=3)
    assert read_metrics(orphans)[2:] == [torn, row(4, loss=9.0)]
    assert [each["loss"] for each in read_metrics(path)[3:]] == [7.0]
    # TensorBoard forgot them too
    assert [step for step, _ in scalars(tmp_path, "loss")] == [100, 200, 300, 400]
    assert scalars(tmp_path, "loss")[-1][1] == 7.0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5), st.integers(0, 5), st.floats(0, 1))
def test_resuming_loses_nothing_wherever_the_file_was_cut(iterations, resume, cut):
    with tempfile.TemporaryDirectory() as folder:
        path, orphans = Path(folder, "metrics.jsonl"), Path(folder, "metrics.orphan.jsonl")
        whole = "".join(json.dumps(row(i)) + "\n" for i in range(1, iterations + 1))
        text = whole[: round(cut * len(whole))]
        path.write_text(text)
        lines = text.splitlines()
        complete = [line for line in lines if line.endswith("}")]
        write_rows(folder, [], resume)
        assert [r["iteration"] for r in read_metrics(path)] == list(range(1, min(resume, len(complete)) + 1))
        moved = read_metrics(orphans) if orphans.exists() else []
        again = path.read_text() + "".join(r["torn"] if "torn" in r else json.dumps(r) + "\n" for r in moved)
        assert again.removesuffix("\n") == text.removesuffix("\n")


def test_a_crash_while_resuming_leaves_the_old_file(tmp_path, monkeypatch):
    write_rows(tmp_path, [row(1), row(2)])
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def crash(*_):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(OSError, match="no space"):
            MetricsLog(tmp_path, 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_killed_process_loses_no_row_that_was_written(tmp_path):
    code = f"""
import sys
from embodied.report.metrics import MetricsLog
log = MetricsLog({str(tmp_path)!r})
for i in range(1, 10**9):
    log.write(dict(iteration=i, env_steps=i, filler='x' * 200))
    print(i, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        while int(process.stdout.readline()) < 50:
            pass
        process.send_signal(signal.SIGKILL)
        seen = [50, *map(int, process.stdout.read().split())][-1]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["iteration"] for r in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= seen


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\nnonsense\n{"iteration": 3}\n')
    with pytest.raises(Fault, match="line 2"):
        read_metrics(path)


def test_without_times():
    times = {"wall_s": 1.0, "steps_per_s": 2.0, "clock/start": 3.0}
    rest = {"iteration": 1, "sampler/mass/s": 0.5, "loss/policy": 0.1, "unclock/x": 2}
    assert without_times({**times, **rest}) == rest


# console


def test_time_left_to_the_target_is_exact_on_a_logistic_curve():
    estimate = Estimate(target_success=0.97)
    middle, scale, end = 300.0, 60.0, 250.0  # seconds
    for t in np.linspace(50.0, end, 9):
        success = 1 / (1 + math.exp(-(t - middle) / scale))
        estimate.add({"wall_s": t, "iteration": 1, "env_steps": 1, "eval/success": success, "success_rate": 0.5})
    reached = middle + scale * math.log(0.97 / 0.03)
    assert estimate.left() == (pytest.approx(reached - end), "target")
    assert estimate.fraction() == pytest.approx(success / 0.97)


def test_time_left_to_the_target_is_unknown_without_a_rise():
    estimate = Estimate(target_success=0.97)
    assert estimate.left() is None
    for t, success in ((10, 0.2), (20, 0.3)):
        estimate.add(row(1) | {"wall_s": t, "eval/success": success})
    assert estimate.left() is None  # two points are no trend
    for t, success in ((30, 0.2), (40, 0.1), (50, 0.1)):
        estimate.add(row(1) | {"wall_s": t, "eval/success": success})
    assert estimate.left() is None


def test_time_left_is_that_of_the_sooner_bound():
    def left(**budget):
        estimate = Estimate(**budget)
        for i in range(31):  # the first ten iterations are ten times slower: only recent ones count
            wall_s = 20.0 * min(i, 10) + 2.0 * max(i - 10, 0)
            estimate.add({"iteration": i, "env_steps": 500 * i, "wall_s": wall_s, "eval/success": i / 100})
        return estimate.left()

    assert left(iterations=100) == (pytest.approx(140.0), "budget")
    assert left(env_steps=20_000) == (pytest.approx(20.0), "budget")
    assert left(minutes=5) == (pytest.approx(60.0), "budget")
    assert left(iterations=100, env_steps=20_000, minutes=5, target_success=0.97) == (pytest.approx(20.0), "budget")
    assert left(iterations=20) == (0.0, "budget")
    assert left(iterations=10**6, target_success=0.97)[1] == "target"


PROGRESS = """
import sys, time
from embodied.report.console import Progress
try:
    with Progress(env_steps=2_000_000, target_success=0.97, line_every_s={every}) as progress:
        progress.message("run in [bold]runs/a")
        for i in range(1, {rows} + 1):
            progress.update({{"iteration": i, "env_steps": 10_000 * i, "wall_s": 2.0 * i, "steps_per_s": 5000.0,
                             "success_rate": 0.5, "eval/success": 0.25}})
            time.sleep(0.02)
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(130)
"""


def test_progress_in_a_pipe_is_plain_lines():
    forced = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    done = run_python(PROGRESS.format(every=0.2, rows=30), env=forced)  # about 0.6 s
    lines = done.stdout.splitlines()
    assert not re.search(r"[^\x20-\x7e\n]", done.stdout)
    assert lines[0] == "run in [bold]runs/a"
    assert "iteration 1 " in lines[1]
    assert 4 <= len(lines) <= 8
    # 1.7 M steps at 5000 a second
    assert lines[-1] == (
        "success 50.0 % (evaluated 25.0 %, target 97.0 %)  left 0:05:40 to budget  "
        "5,000 steps/s  300,000 steps  iteration 30  elapsed 0:01:00"
    )
    assert done.returncode == 0


def test_progress_in_a_dumb_terminal_or_without_rows():
    done = run_python(PROGRESS.format(every=9, rows=0))
    assert done.stdout == "run in [bold]runs/a\n"


def test_progress_on_a_terminal_is_live_and_leaves_ctrl_c_alone():
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm", COLUMNS="80", LINES="24")
        os.execv(sys.executable, [sys.executable, "-c", PROGRESS.format(every=9, rows=10_000)])
    output, interrupted, deadline = b"", False, time.monotonic() + 30
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            output += os.read(terminal, 65536)
        except OSError:  # the child has closed its side
            break
        if not interrupted and len(set(re.findall(rb"iteration (\d+)", output))) >= 2:
            os.write(terminal, b"\x03")
            interrupted = True
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    text = output.decode()
    assert "run in [bold]runs/a" in text
    assert "success 50.0 % (evaluated 25.0 %, target 97.0 %)" in text
    assert "interrupted" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is visible again
    assert max(len(re.sub(r"\x1b\[[0-9;?]*\w", "", line)) for line in re.split(r"[\r\n]+", text)) <= 80


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


# environment


def git(folder, *arguments):
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    return subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True).stdout


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_bytes(b"one\nd\xe9j\xe0\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_a_clean_checkout_is_its_commit(checkout):
    source = environment._source(checkout)
    assert source["commit"] == git(checkout, "rev-parse", "HEAD").decode().strip()
    assert (source["modified"], source["patch"], source["untracked"]) == (False, None, [])


def test_the_patch_makes_the_modified_source_again(checkout):
    (checkout / "a.txt").write_bytes(b"one\nd\xe9j\xe0\ntwo \xe8\n")
    (checkout / "new.py").touch()
    source = json.loads(json.dumps(environment._source(checkout)))
    assert source["modified"]
    assert source["untracked"] == ["new.py"]
    modified = (checkout / "a.txt").read_bytes()
    git(checkout, "checkout", "-q", "a.txt")
    (checkout / "p.patch").write_bytes(source["patch"].encode(errors="surrogateescape"))
    git(checkout, "apply", "p.patch")
    assert (checkout / "a.txt").read_bytes() == modified


def test_a_folder_inside_somebody_elses_checkout_is_no_source(checkout):
    (checkout / "site-packages").mkdir()
    assert environment._source(checkout / "site-packages") is None


def test_the_environment_names_no_person(tmp_path, monkeypatch):
    home = tmp_path / "jane"
    monkeypatch.setenv("HOME", str(home))
    out = f"out={home}/runs/a"
    monkeypatch.setattr(sys, "argv", [f"{home}/bin/embodied", "train", out, "data=/scratch/jane/x", "task.name=janet"])
    described = environment.describe()
    assert described["command"] == ["embodied", "train", "out=~/runs/a", "data=/scratch/<user>/x", "task.name=janet"]
    (described.get("source") or {}).pop("patch", None)
    assert str(home) not in json.dumps(described)
    assert described["torch"]["threads"] == torch.get_num_threads()
    assert described["packages"]["torch"] == torch.__version__
    assert described["host"]["memory_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# recording


def moving_square(n, height=64, width=96):
    for i in range(n):
        frame = np.full((height, width, 3), (200, 40, 90), np.uint8)
        frame[16:48, 4 * i : 4 * i + 32] = (20, 180, 240)
        yield frame


def test_a_video_comes_back(tmp_path):
    import av

    path = tmp_path / "episode.mp4"
    recording.write_video(moving_square(12), path, fps=12.5)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert float(stream.average_rate) == 12.5
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 12
    for frame, original in zip(frames, moving_square(12), strict=True):
        assert np.abs(frame.astype(int) - original).mean() < 6
    assert [p.name for p in tmp_path.iterdir()] == ["episode.mp4"]


@pytest.mark.parametrize(
    ("frames", "error", "message"),
    [
        ([], Fault, "no frames"),
        ([np.zeros((32, 32, 3), np.uint8)] * 3, Fault, "black"),
        ([np.zeros((31, 32, 3), np.uint8)], BadInput, "render 32 x 32"),
        ([np.zeros((32, 32), np.uint8)], BadInput, r"expected \[H, W, 3\]"),
        ([np.zeros((32, 32, 3), np.float32)], BadInput, "frame 0 is float32"),
        ([np.ones((32, 32, 3), np.uint8), np.ones((32, 34, 3), np.uint8)], BadInput, "frame 1"),
    ],
)
def test_a_bad_video_is_refused_and_not_kept(tmp_path, frames, error, message):
    with pytest.raises(error, match=message):
        recording.write_video(frames, tmp_path / "v.mp4", fps=25)
    assert not list(tmp_path.iterdir())


def test_a_video_with_one_bright_frame_is_not_black(tmp_path):
    frames = [np.zeros((32, 32, 3), np.uint8)] * 3 + [np.full((32, 32, 3), 60, np.uint8)]
    recording.write_video(frames, tmp_path / "v.mp4", fps=25)
    assert recording._decode(tmp_path / "v.mp4")[0] == 4


def test_a_video_that_lost_a_frame_is_refused(tmp_path, monkeypatch):
    decode = recording._decode
    monkeypatch.setattr(recording, "_decode", lambda path: (decode(path)[0] - 1, 255))
    with pytest.raises(Fault, match="12 frames were written but 11"):
        recording.write_video(moving_square(12), tmp_path / "v.mp4", fps=25)
    assert not list(tmp_path.iterdir())


GEOMS = {
    "floor": recording.Geom("plane", [0, 0, 1], [0.5, 0.5, 0.5, 1]),
    "a/box": ("box", [0.1, 0.2, 0.3], [1, 0, 0, 1]),
    "ball": ("sphere", [0.4, 0, 0], [0, 1, 0, 0.5]),
    "egg": ("ellipsoid", [0.1, 0.2, 0.3], [0, 0, 1, 1]),
    "pill": ("capsule", [0.05, 0.3, 0], [0, 0, 1, 1]),
    "can": ("cylinder", [0.05, 0.3, 0], [0, 0, 1, 1]),
}


def read_recording(path):
    """(static columns, timed columns with `time` in seconds) by entity, as the library reads them."""
    from rerun.chunk import RrdReader

    static, timed = {}, {}
    for chunk in RrdReader(path).stream():
        batch = chunk.to_record_batch()
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names if ":" in name}
        if not chunk.is_static:
            columns["time"] = [nanoseconds / 1e9 for nanoseconds in batch.column("time").cast("int64").to_pylist()]
        known = (static if chunk.is_static else timed).setdefault(chunk.entity_path, {})
        for name, values in columns.items():
            known.setdefault(name, []).extend(values)
    return static, timed


@pytest.mark.filterwarnings("error")
def test_a_rerun_recording_comes_back(tmp_path):
    path = tmp_path / "episode.rrd"
    names = list(GEOMS)
    positions, quats = np.zeros((6, 3)), np.tile([1.0, 0, 0, 0], (6, 1))
    with recording.RerunRecording(path) as record:
        record.log_scene(names, list(GEOMS.values()))
        for step in range(5):
            positions[1] = [step, 0, 0.5]
            if step == 3:
                quats[2] = [0.5, 0.5, -0.5, 0.5]
            image = np.full((8, 8, 3), 40 * step, np.uint8) if step == 4 else None
            record.log_step(0.04 * step, positions, quats, {"reward": 2.0 * step}, image)
    static, timed = read_recording(path)

    box, ball = timed["/world/a\\/box"], timed["/world/ball"]
    assert box["time"] == pytest.approx([0, 0.04, 0.08, 0.12, 0.16])
    assert np.array(box["Transform3D:translation"])[:, 0].tolist() == [[s, 0, 0.5] for s in range(5)]
    assert ball["time"] == pytest.approx([0, 0.12])  # logged when it moves
    assert ball["Transform3D:quaternion"][1] == [[0.5, -0.5, 0.5, 0.5]]  # xyzw
    assert timed["/scalars/reward"]["Scalars:scalars"] == [[0.0], [2.0], [4.0], [6.0], [8.0]]
    assert len(timed["/image"]["time"]) == 1

    # MuJoCo sizes: half sizes; radius; radius and half length. All centred on the geom's frame
    shape = {name: static[f"/world/{name}"] for name in ("a\\/box", "ball", "egg", "pill", "can", "floor")}
    assert shape["a\\/box"]["Boxes3D:half_sizes"][0][0] == pytest.approx([0.1, 0.2, 0.3])
    assert shape["ball"]["Ellipsoids3D:half_sizes"][0][0] == pytest.approx([0.4, 0.4, 0.4])
    assert shape["egg"]["Ellipsoids3D:half_sizes"][0][0] == pytest.approx([0.1, 0.2, 0.3])
    assert shape["pill"]["Capsules3D:lengths"][0] == pytest.approx([0.6])
    assert shape["pill"]["Capsules3D:translations"][0][0] == pytest.approx([0, 0, -0.3])
    assert shape["can"]["Cylinders3D:lengths"][0] == pytest.approx([0.6])
    half, centre = (shape["floor"][f"Boxes3D:{what}"][0][0] for what in ("half_sizes", "centers"))
    assert half[:2] == [5.0, 5.0]
    assert centre[2] + half[2] == pytest.approx(0.0)  # its upper face is the plane
    assert shape["a\\/box"]["Boxes3D:colors"][0] == [0xFF0000FF]


def test_a_recording_refuses_what_it_cannot_show(tmp_path):
    with recording.RerunRecording(tmp_path / "r.rrd") as record:
        with pytest.raises(BadInput, match="did you mean 'capsule'"):
            record.log_scene(["a"], [("capsul", [1, 1, 1], [1, 1, 1, 1])])
        with pytest.raises(BadInput, match="1 different"):
            record.log_scene(["a", "a"], [GEOMS["ball"]] * 2)
        record.log_scene(["a"], [GEOMS["ball"]])
        with pytest.raises(BadInput, match=r"expected \[1, 3\]"):
            record.log_step(0.0, np.zeros((2, 3)), np.zeros((2, 4)), {})
