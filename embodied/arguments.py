"""The arguments of a command that has its own few options: `key=value` words against one dataclass.

Hydra would need a second to be imported, and an emergency stop is one of these commands; values are YAML here.
"""

from __future__ import annotations

from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embodied.keys import check_value, expected, types_of
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
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key.startswith("-"):
            raise BadInput(f"cannot read '{word}': expected key=value (embodied {command} --help)")
        if key not in types:
            raise BadInput(f"unknown key '{key}': {nearest(key, types)} (embodied {command} --help)")
        if key in given:
            raise BadInput(f"{key}= is given twice: {word} and another")
        given.add(key)
        try:
            value = yaml.safe_load(text)
            OmegaConf.update(node, key, value, merge=True)
        except (OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
            raise BadInput(f"{word}: {expected(key, types)}") from error
        check_value(key, value, types[key])
    missing = sorted(OmegaConf.missing_keys(node))
    if missing:
        raise BadInput(f"{missing[0]} is missing: embodied {command} {missing[0]}=... (embodied {command} --help)")
    built: T = OmegaConf.to_object(node)  # type: ignore[assignment]  # of the structured class
    return built
