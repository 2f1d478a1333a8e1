"""`embodied deploy replay` and `repair`: what to do with a journal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from embodied.arguments import read
from embodied.deploy import journal as journals
from embodied.runs import check_new
from embodied.spec.errors import BadInput


@dataclass
class ReplayOptions:
    """Options of `embodied deploy replay`."""

    journal: str = MISSING  # the file, or the folder of a deployment run
    out: str | None = None  # file to write; beside the journal by default
    episode: int | None = None  # all by default


@dataclass
class RepairOptions:
    """Options of `embodied deploy repair`."""

    journal: str = MISSING


def replay(words: list[str]) -> int:
    """Write a rerun recording of a journal."""
    options = read("deploy replay", ReplayOptions, words)
    path = _find(options.journal)
    out = path.with_suffix(".rrd") if options.out is None else Path(options.out).expanduser()
    check_new(out)
    from embodied.deploy.replay import replay as write  # rerun takes a while to import

    write(path, out, options.episode)
    print(f"recording: {out} (open with: rerun {out})")
    return 0


def repair(words: list[str]) -> int:
    """Set a torn end aside."""
    path = _find(read("deploy repair", RepairOptions, words).journal)
    done = journals.repair(path)
    print(f"{path}: {done.records} records, {done.episodes} finished episodes, {done.incomplete} unfinished")
    if done.torn is None:
        print("nothing is torn")
    else:
        print(f"{done.torn_bytes} bytes set aside in {done.torn}; {done.torn_records} records in there are intact")
    return 0


def _find(text: str) -> Path:
    path = Path(text).expanduser()
    file = path / "journal.emb" if path.is_dir() else path
    if not file.is_file():
        raise BadInput(f"journal={text}: there is no such journal; a deployment run keeps it as <out>/journal.emb")
    return file
