"""A journal as a rerun recording, to look at: what the robot did, was asked, was sent, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embodied.deploy.journal import Record, read
from embodied.spec.errors import BadInput, Fault

if TYPE_CHECKING:
    import rerun

Vector = NDArray[np.float32]

AXES = 0.05  # m, shown length of a frame's axes
SCALARS = ("age_us", "infer_us", "late_us", "level")
NORMS = ("force", "torque")
TRAILS = {"tcp": (80, 160, 255), "sent": (255, 160, 60)}  # RGB
LEVELS = {"fault": "ERROR", "estop": "ERROR", "hold": "WARN"}


def replay(journal: Path, out: Path, episode: int | None = None) -> None:
    """Write a journal as an .rrd file for the rerun viewer (`rerun file.rrd`).

    The timeline `time` is the time of capture, in seconds since the journal began. Entities: `world/<frame>`, the pose in the
    robot's base frame of each frame of the readings, of `target` (asked) and of `sent`, with `world/target_kept` for the
    target that the robot itself reports; `world/trails/tcp|sent`, each episode's path, from its beginning on;
    `scalars/force|torque` (norms), `scalars/age_us|infer_us|late_us|level`; `log/transitions`, `log/guard` (the verdict's
    reasons, when they change), `log/events`, `log/episodes`. Records of other kinds are not shown.

    Args:
        journal: the journal to read, whole.
        out: the file to write, or to write over; its folder exists. Nothing is left there if this fails.
        episode: the only one to show; None: everything.

    Raises:
        BadInput: no such journal, episode or folder.
        Fault: the journal is damaged, a record is not as the runner writes it, or `out` cannot be written.
    """
    import rerun

    out = Path(out)
    if not out.parent.is_dir():
        raise BadInput(f"{out.parent} is not a folder: make it, or choose another one for the recording")
    records = read(journal)
    began_ns = next(records).time_ns
    shown = _Shown(began_ns)
    for record in _of_episode(journal, records, episode):
        try:
            shown.add(record)
        except (KeyError, TypeError, ValueError) as error:
            what = f"'{record.kind}' at {record.time_ns} ns is not as the runner writes it"
            raise Fault(f"{journal}: the record {what}: {type(error).__name__}: {error}") from error
    partial = out.with_name(out.name + ".partial")
    stream = rerun.RecordingStream("embodied")
    try:
        stream.save(str(partial))
        shown.send(stream)
        stream.flush(timeout_sec=60.0)  # raises what `disconnect` only prints: a full disk
        stream.disconnect()
        partial.replace(out)
    except RuntimeError as error:
        raise Fault(f"{out} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _of_episode(journal: Path, records: Iterable[Record], episode: int | None) -> Iterable[Record]:
    """The records from an episode's start to its end."""
    if episode is None:
        return list(records)
    inside, found, numbers = False, [], []
    for record in records:
        if record.kind == "episode_start":
            numbers.append(record.data.get("episode"))
            inside = numbers[-1] == episode
        if inside:
            found.append(record)
        inside &= record.kind != "episode_end"
    if not found:
        raise BadInput(f"{journal} has no episode {episode}: it has {', '.join(map(str, numbers)) or 'none'}")
    return found


class _Shown:
    """Collects what is shown as columns, rows with their times in front: rerun takes long for rows of their own."""

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self.poses: dict[str, list[tuple[float, Vector, Vector]]] = defaultdict(list)  # position, quaternion wxyz
        self.scalars: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.texts: dict[str, list[tuple[float, str, str]]] = defaultdict(list)  # text, level
        self.trails: list[tuple[float, dict[str, list[Vector]]]] = []  # an episode's beginning, positions by name
        self.running = False
        self.reasons: list[str] = []

    def add(self, record: Record) -> None:
        time_s, data = (record.time_ns - self.began_ns) / 1e9, record.data
        match record.kind:
            case "tick":
                self._add_tick(time_s, data)
            case "transition":
                reason = f": {data['reason']}" if data["reason"] else ""
                self._say("transitions", time_s, f"{data['from']} -> {data['to']}{reason}", LEVELS.get(data["to"], "INFO"))
            case "event":
                self._say("events", time_s, data["text"])
            case "episode_start":
                self.running = True
                self.trails.append((time_s, {name: [] for name in TRAILS}))
                self._say("episodes", time_s, f"episode {data['episode']} begins")
            case "episode_end":
                self.running = False
                reason = f": {data['reason']}" if data["reason"] else ""
                text = f"episode {data['episode']} ends after {data['steps']} steps, {data['outcome']}{reason}"
                self._say("episodes", time_s, text, LEVELS.get(data["outcome"], "INFO"))

    def _add_tick(self, time_s: float, data: Mapping[str, Any]) -> None:
        readings = data["readings"]
        poses = {name.removesuffix("_pos"): name for name in readings if name.endswith("_pos")}
        for frame, name in poses.items():
            if f"{frame}_quat" in readings:
                self._add_pose("target_kept" if frame == "target" else frame, time_s, readings[name], readings[f"{frame}_quat"])
        for frame in ("target", "sent"):
            if data[f"{frame}_pos"] is not None:
                self._add_pose(frame, time_s, data[f"{frame}_pos"], data[f"{frame}_quat"])
        for name in SCALARS:
            self.scalars[name].append((time_s, float(data[name])))
        for name in NORMS:
            if name in readings:
                self.scalars[name].append((time_s, float(np.linalg.norm(readings[name]))))
        if data["reasons"] != self.reasons:
            self.reasons = data["reasons"]
            self._say("guard", time_s, "; ".join(self.reasons) or "none any more", "WARN" if self.reasons else "INFO")

    def _add_pose(self, name: str, time_s: float, pos: Vector, quat: Vector) -> None:
        pos, quat = np.reshape(pos, 3), np.reshape(quat, 4)
        self.poses[name].append((time_s, pos, quat))
        if self.running and name in TRAILS:
            self.trails[-1][1][name].append(pos)

    def _say(self, entity: str, time_s: float, text: str, level: str = "INFO") -> None:
        self.texts[entity].append((time_s, text, level))

    def send(self, stream: rerun.RecordingStream) -> None:
        import rerun

        def send(entity: str, times: Iterable[float], columns: Iterable[rerun.ComponentColumn]) -> None:
            stream.send_columns(entity, [rerun.TimeColumn("time", duration=times)], columns, strict=True)

        stream.log("world", rerun.ViewCoordinates.RIGHT_HAND_Z_UP, static=True, strict=True)
        for name, rows in self.poses.items():
            entity = f"world/{rerun.escape_entity_path_part(name)}"
            times, positions, quats = (np.array(column) for column in zip(*rows, strict=True))
            stream.log(entity, rerun.TransformAxes3D(AXES), static=True, strict=True)
            send(entity, times, rerun.Transform3D.columns(translation=positions, quaternion=np.roll(quats, -1, axis=1)))
        for name, values in self.scalars.items():
            times, numbers = np.array(values).T
            send(f"scalars/{name}", times, rerun.Scalars.columns(scalars=numbers))
        for name, lines in self.texts.items():
            moments, texts, levels = zip(*lines, strict=True)
            send(f"log/{name}", moments, rerun.TextLog.columns(text=texts, level=levels))
        for time_s, trails in self.trails:
            stream.set_time("time", duration=time_s)
            for name, colour in TRAILS.items():
                # also an empty one: it replaces that of the episode before
                strips = rerun.LineStrips3D([trails[name]] if trails[name] else [], colors=[colour])
                stream.log(f"world/trails/{name}", strips, strict=True)
