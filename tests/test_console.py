import math
import os
import pty
import re
import select
import subprocess
import sys
import time

import numpy as np
import pytest
from test_metrics import row

from embodied.report.console import Estimate


def run_python(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **options)


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
