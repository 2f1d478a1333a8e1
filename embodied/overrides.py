"""Hydra's override grammar: reading `key=value`, expanding sweeps, refusing what no option needs."""

from __future__ import annotations

import itertools
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from embodied.keys import GROUPS, SOURCES, choices
from embodied.spec.errors import BadInput


def parse(overrides: list[str]) -> list[Override]:
    """The overrides of a command line.

    Raises:
        BadInput: one is not `key=value`.
    """
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except (HydraException, RecursionError) as error:
            known = next((group for group in GROUPS if text in choices(group)), None)
            hint = f"did you mean {known}={text}?" if known else "expected key=value, special characters in quotes"
            raise BadInput(f"cannot read '{text}': {hint}") from error
    return parsed


def expand(overrides: list[str]) -> list[list[str]]:
    """The jobs of a sweep: every combination of the values of `a=1,2`, `choice(...)`, `range(...)` and `glob(...)`.

    Of two overrides of one key the last counts, as in Hydra's own sweeper.

    Raises:
        BadInput: see `parse`; a `glob` that matches no choice.
    """
    axes = {}
    for one in parse(overrides):
        key = one.get_key_element()
        value: Any = one.value()
        if isinstance(value, Glob):
            if key not in GROUPS:
                raise BadInput(f"{one.input_line}: glob() works for {', '.join(GROUPS)}")
            found = value.filter(choices(key))
            if not found:
                raise BadInput(f"{one.input_line}: matches none of {', '.join(choices(key))}")
            axes[key] = [f"{key}={name}" for name in found]
        elif one.is_discrete_sweep():
            axes[key] = [f"{key}={word}" for word in one.sweep_string_iterator()]
        else:
            axes[key] = [str(one.input_line)]
    return [list(job) for job in itertools.product(*axes.values())]


def check_form(one: Override) -> None:
    """Refuse what Hydra can do to a key besides giving it one value."""
    key = one.key_or_group
    if one.package is not None:
        raise BadInput(f"{one.input_line}: packages (@) have no use here: write {key}=value")
    if one.is_delete():
        raise BadInput(f"{one.input_line}: every option has a value and none can be removed: write {key}=value")
    if one.is_add() or (one.is_force_add() and key in (*GROUPS, *SOURCES)):
        raise BadInput(f"{one.input_line}: {key} exists already: write {key}=value without '+'")
    if one.is_sweep_override():
        raise BadInput(f"{one.input_line}: several values need -m, which runs them in turn")
