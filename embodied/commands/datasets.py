"""Whether the datasets that a training learns from say what its task would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied.data.files import EXTRA, load_json
from embodied.spec.errors import BadInput
from embodied.spec.meaning import difference
from embodied.spec.policy import PolicySpec

OPTIONS = ("data", "co_data")
"""Options of learners that name a dataset."""


def check_datasets(config: Mapping[str, Any], spec: PolicySpec) -> None:
    """Refuse a dataset of ours whose observations or actions mean something else than those of the task's `spec`.

    Which differences count, `embodied.spec.meaning` says. Datasets that do not have a specification, because others wrote
    them, can only be judged by their widths, which learners do.

    Raises:
        BadInput: with the first difference; or the specification cannot be read.
    """
    for option in OPTIONS:
        folder = config["algo"].get(option)
        if not folder or not (Path(folder) / EXTRA).exists():
            continue
        saved = load_json(Path(folder), EXTRA).get("spec")
        if saved is None:
            continue
        try:
            theirs = PolicySpec.from_dict(saved)
        except (AttributeError, BadInput, KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"{Path(folder) / EXTRA}: its spec cannot be read ({error!r}): restore it from a copy, or collect the data anew"
            ) from None
        if found := difference(theirs, spec):
            raise BadInput(
                f"algo.{option}={folder}: {found}: collect the data with the task and robot options that are trained, or train "
                "with those of the data"
            )
