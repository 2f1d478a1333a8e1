import json
import math
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.report.metrics import MetricsLog, read_metrics, without_times
from embodied.spec.errors import BadInput, Fault


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
