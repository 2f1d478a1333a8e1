"""The arguments of a command that has its own few options: `key=value` words against one dataclass."""

from __future__ import annotations

from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embodied.keys import check_value, expected, types_of
from embodied.overrides import check_form, parse
from embodied.spec.errors import BadInput, nearest

T = TypeVar("T")


def read(command: str, cls: type[T], words: list[str]) -> T:
    """An instance of the dataclass `cls` with what `words` say; a field without a default must be given.

    Raises:
        BadInput: a key that is no option, given twice, of a wrong type, or missing.
    """
    types = types_of(cls)
    node: Any = OmegaConf.structured(cls)
    given = set()
    for one in parse(words):
        key, value = one.key_or_group, one.value()
        if key not in types:
            raise BadInput(f"unknown key '{key}': {nearest(key, types)} (embodied {command} --help)")
        if key in given:
            raise BadInput(f"{key}= is given twice: {one.input_line} and another")
        check_form(one)
        given.add(key)
        try:
            OmegaConf.update(node, key, value, merge=True)
        except (OmegaConfBaseException, ValueError) as error:
            raise BadInput(f"{one.input_line}: {expected(key, types)}") from error
        check_value(key, value, types[key])
    missing = sorted(OmegaConf.missing_keys(node))
    if missing:
        raise BadInput(f"{missing[0]} is missing: embodied {command} {missing[0]}=... (embodied {command} --help)")
    built: T = OmegaConf.to_object(node)  # type: ignore[assignment]  # of the structured class
    return built
