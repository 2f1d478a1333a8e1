"""Run folders on disk: finding the checkpoint that a path names, and a place for a new run."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from embodied.spec.errors import BadInput


def locate(key: str, text: str) -> Path:
    """The checkpoint file `<run>/checkpoints/*.pt` that a path names: a run folder's latest, or the file itself.

    Args:
        key: what the user wrote the path after (`resume` or `checkpoint`), for errors.
        text: the path.

    Raises:
        BadInput: nothing is there, it is no run, or the file is not a whole checkpoint.
    """
    try:
        path = Path(text).expanduser()
        if not path.exists():
            raise BadInput(f"{key}={text}: there is no such folder or file")
        file = path / "checkpoints" / "latest.pt" if path.is_dir() else path.absolute()
        if not (folder_of(file) / "config.yaml").is_file():
            raise BadInput(f"{key}={text}: not a run: expected its folder (with config.yaml) or <run>/checkpoints/*.pt")
        if not file.is_file():
            raise BadInput(f"{key}={text}: the run has no checkpoint yet ({file} is missing)")
        with file.open("rb") as stream:
            whole = zipfile.is_zipfile(stream)  # what torch.save writes; its directory is at the end, so cut files fail
    except (OSError, RuntimeError) as error:  # RuntimeError: expanduser of an unknown user
        raise BadInput(f"{key}={text}: cannot be read: {error}") from error
    if not whole:
        raise BadInput(f"{key}={text}: {file.name} is no checkpoint: it is damaged or was written by something else")
    return file


def newest() -> Path | None:
    """The folder under `runs/` whose checkpoint was written last, None if there is none."""
    found = Path("runs").glob("**/checkpoints/latest.pt")
    file = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return None if file is None else folder_of(file)


def folder_of(checkpoint: Path) -> Path:
    """The run folder of `<run>/checkpoints/*.pt`."""
    return checkpoint.parent.parent


def check_new(folder: Path, key: str = "out") -> None:
    """Refuse a folder or file that exists or cannot be made. Tries it: permission bits do not tell of a read-only mount.

    Raises:
        BadInput: with what to do instead.
    """
    try:
        if folder.exists():
            resume = f", or continue it with resume={folder}" if (folder / "config.yaml").is_file() else ""
            raise BadInput(f"{key}={folder} exists: choose another{resume}")
        parent = next(path for path in folder.absolute().parents if path.exists())
        with tempfile.TemporaryDirectory(dir=parent):
            pass
    except OSError as error:
        raise BadInput(f"{key}={folder} cannot be made ({error.strerror}): choose another with {key}=") from error
