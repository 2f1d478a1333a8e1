"""metrics.jsonl: one JSON object an iteration, mirrored to TensorBoard."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from embodied.spec.errors import BadInput, Fault

Row = dict[str, Any]
"""Metrics of an iteration by name; numbers, or None where a value is not finite or not known."""

FLUSH_S = 10.0  # of the TensorBoard mirror


class MetricsLog:
    """Appends rows to `run_dir/metrics.jsonl` and mirrors their numbers to TensorBoard against env_steps.

    Each row reaches the operating system before `write` returns: killing the process loses none.

    Args:
        run_dir: the run's folder; it exists.
        resume_iteration: None for a new run. When resuming, the checkpoint's iteration: rows newer than it, which are
            going to be lived again, move to metrics.orphan.jsonl.

    Raises:
        BadInput: a new run, but the folder already has metrics.
    """

    def __init__(self, run_dir: Path, resume_iteration: int | None = None) -> None:
        # 0.2 s, so not for everyone who imports this module; torch's SummaryWriter would take twice that
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        path = Path(run_dir) / "metrics.jsonl"
        next_step = 0
        if resume_iteration is not None:
            last = _drop_newer(path, resume_iteration)
            next_step = last["env_steps"] + 1 if last else 0
        elif path.exists():
            raise BadInput(f"{path} exists: resume that run with resume={run_dir}, or give another folder as out=")
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._events = EventFileWriter(str(run_dir), flush_secs=FLUSH_S)
        # a restart tells TensorBoard to forget the points from next_step on: they are going to be lived again
        restart = SessionLog(status=SessionLog.START)
        self._events.add_event(Event(wall_time=time.time(), step=next_step, session_log=restart))

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; it has `iteration` and `env_steps`. Numbers may be Python's, NumPy's or 0-d tensors."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = {key: value.item() if hasattr(value, "item") else value for key, value in row.items()}
        step = values["env_steps"]
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        scalars = [Summary.Value(tag=key, simple_value=float(v)) for key, v in values.items() if isinstance(v, int | float)]
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        """Flush and close both files."""
        self._file.close()
        self._events.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl file; a last line without its end (being written, or torn by a kill) is left out.

    Raises:
        Fault: another line is not a JSON object.
    """
    return [row for _, row in _parse(Path(path)) if row is not None]


def without_times(row: Mapping[str, Any]) -> Row:
    """`row` without what holds times (`*_s`, `clock/*`): what equal seeds reproduce bit by bit."""
    return {key: value for key, value in row.items() if not (key.endswith("_s") or key.startswith("clock/"))}


def _parse(path: Path) -> list[tuple[str, Row | None]]:
    """(text, row) of each line; row is None for a torn last line."""
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    parsed: list[tuple[str, Row | None]] = []
    for number, line in enumerate(lines, start=1):
        last = number == len(lines)
        if last and not line:
            break
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict):
            if not last:
                raise Fault(f"{path}, line {number} is not a JSON object: mend or delete that line")
            row = None
        parsed.append((line, row))
    return parsed


def _drop_newer(path: Path, iteration: int) -> Row | None:
    """Move rows newer than `iteration` and a torn last line to metrics.orphan.jsonl; return the last row kept.

    A torn line becomes {"torn": text} there, so that the orphans stay JSON lines.
    """
    if not path.exists():
        return None
    kept: list[tuple[str, Row]] = []
    orphans: list[str] = []
    for line, row in _parse(path):
        if row is None:
            orphans.append(json.dumps({"torn": line}))
        elif row["iteration"] > iteration:
            orphans.append(line)
        else:
            kept.append((line, row))
    # orphans first: a kill between the two steps leaves them twice, never lost
    if orphans:
        with path.with_name("metrics.orphan.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in orphans)
            file.flush()
            os.fsync(file.fileno())
    temporary = path.with_name("metrics.jsonl.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line, _ in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself
    finally:
        os.close(directory)
    return kept[-1][1] if kept else None
