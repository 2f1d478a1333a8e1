"""Keys of a run's configuration: which exist, what they hold, what to say of a wrong one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import embodied
from embodied.config import RunConfig
from embodied.spec import registry
from embodied.spec.errors import BadInput, nearest

GROUPS = ("task", "robot", "sampler", "policy", "algo")
SOURCES = ("resume", "checkpoint")
"""Keys that name a saved run: they are no options of a run themselves."""


def option_types(groups: Mapping[str, type]) -> dict[str, Any]:
    """The type of every option of a run by dotted key, sections included, given the options dataclass of each group."""
    found = types_of(RunConfig)
    for group in GROUPS:
        del found[group]  # a choice, not an option
        if group in groups:
            found |= types_of(groups[group], f"{group}.")
    return found


def types_of(cls: type, prefix: str = "") -> dict[str, Any]:
    """The type of every option of a dataclass by dotted key, sections included."""
    found: dict[str, Any] = {}
    types = get_type_hints(cls)
    for option in fields(cls):
        found[prefix + option.name] = types[option.name]
        if is_dataclass(types[option.name]):
            found |= types_of(types[option.name], f"{prefix}{option.name}.")
    return found


def check_key(key: str, value: Any, types: Mapping[str, Any]) -> None:
    """Refuse a dotted key that is no option, naming the nearest; looks into a section given as a dict."""
    if key in types:
        if is_dataclass(types[key]) and isinstance(value, dict):
            for inner, content in value.items():
                check_key(f"{key}.{inner}", content, types)
        return
    if _container(key, types):
        return
    head, _, rest = key.partition(".")
    if head in GROUPS and rest == "name":
        raise BadInput(f"unknown key '{key}': choose with {head}=")
    same_leaf = [name for name in types if name.endswith(f".{key.rpartition('.')[2]}")]
    inside = [name.removeprefix(f"{head}.") for name in types if name.startswith(f"{head}.")]
    if same_leaf:
        hint = f"did you mean '{same_leaf[0]}'?"
    elif rest and inside:
        close = difflib.get_close_matches(rest, inside, n=1, cutoff=0.5)
        hint = f"did you mean '{head}.{close[0]}'?" if close else f"{head} has {', '.join(inside)}"
    else:
        words = {*GROUPS, *SOURCES, *types}
        hint = nearest(key, words)
        if hint.startswith("valid"):  # a hundred names help nobody
            hint = nearest(key, [word for word in words if "." not in word])
    raise BadInput(f"unknown key '{key}': {hint}")


def check_value(key: str, value: Any, hint: Any) -> None:
    """Refuse numbers that no option can mean, and tuples of a wrong length, which OmegaConf lets through."""
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"{key}={value}: expected a finite number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise BadInput(f"{key}={value}: too large, expected less than 2^63")
    if isinstance(value, list):
        args = get_args(_required(hint))
        if get_origin(_required(hint)) is tuple and Ellipsis not in args and len(value) != len(args):
            raise BadInput(f"{key}={value}: expected {len(args)} values")
        for index, item in enumerate(value):
            check_value(f"{key}.{index}", item, Any)


def expected(key: str, types: Mapping[str, Any]) -> str:
    """What the known `key` should hold, in words."""
    name = key if key in types else _container(key, types)
    assert name is not None
    hint = _required(types[name])
    if is_dataclass(hint):
        return f"{name} is a section: write {name}.{fields(hint)[0].name}=value"
    if isinstance(hint, type) and issubclass(hint, Enum):
        text = "one of " + ", ".join(hint.__members__)
    elif get_args(hint):
        text = str(hint)
    else:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        text = words.get(hint) or str(hint)
    return f"expected {text}{' or null' if hint is not types[name] else ''}{'' if name == key else f' as {name}'}"


def with_tuples(built: Any) -> Any:
    """The dataclass instance with tuples where its types say so: OmegaConf makes lists of them."""
    types = get_type_hints(type(built))
    changes = {}
    for option in fields(built):
        value = getattr(built, option.name)
        if is_dataclass(value):
            changes[option.name] = with_tuples(value)
        elif get_origin(_required(types[option.name])) is tuple and value is not None:
            changes[option.name] = tuple(value)
    return replace(built, **changes) if changes else built


def choices(group: str) -> list[str]:
    """What can be chosen in a group: registered names and presets."""
    return sorted({*registry.names(group), *presets(group)})


def presets(group: str) -> dict[str, Path]:
    """The preset files of a group by name: `configs/<group>/<name>.yaml`."""
    return {path.stem: path for path in sorted((presets_dir() / group).glob("*.yaml"))}


def presets_dir() -> Path:
    """`configs/` in the package of a wheel, at the root of a checkout."""
    package = Path(embodied.__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def _container(key: str, types: Mapping[str, Any]) -> str | None:
    """The list or dict option that the dotted `key` reaches into."""
    parts = key.split(".")
    above = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
    found = next((name for name in above if name in types), None)
    return found if found and get_origin(_required(types[found])) in (list, dict, tuple) else None


def _required(hint: Any) -> Any:
    """The type without its `| None`."""
    rest = [arg for arg in get_args(hint) if arg is not NoneType]
    return rest[0] if get_origin(hint) in (Union, UnionType) and len(rest) == 1 else hint
