"""From the words of a command line to a checked, resolved configuration.

Hydra's grammar reads the overrides and its compose API merges the registered option dataclasses; its own checks let
misspelt keys through after `+` and its errors have many lines, so keys, choices, types and ranges are checked here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, get_type_hints

import hydra
import psutil
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from embodied.config import CHOICES, RunConfig, validate
from embodied.keys import (
    GROUPS,
    SOURCES,
    check_key,
    check_value,
    choices,
    expected,
    option_types,
    presets,
    with_tuples,
)
from embodied.overrides import check_form, parse
from embodied.runs import check_new, folder_of, locate, newest
from embodied.spec import registry
from embodied.spec.errors import BadInput, nearest

RESUMABLE = ("budget",)
EVALUABLE = ("task", "robot", "sim", "episodes", "seed", "out", "device", "eval")
MEASURES = ("bench sim", "deploy sim")
"""Commands that keep no run."""
MEASURED = (*GROUPS, "sim", "seed", "device")
EXPERT, EXPERTS = "expert", ("script",)
"""Who acts in `collect` in place of a run's policy."""


@dataclass(frozen=True)
class Invocation:
    """What a command works from.

    Attributes:
        command: its name, `train`, `eval`, `play`, `export`, `bench sim` or `deploy sim`.
        config: the whole `RunConfig`, resolved, plain data; each group holds its registered `name` beside its options.
        overrides: as typed, without sweeps.
        run_dir: where the command writes: `out`; without it the run that is continued or evaluated, or a new folder's
            name. A new folder does not exist yet, and `bench sim` needs none.
        checkpoint: the file to evaluate.
        resume: the checkpoint file to continue from.
        out_file: the file to `export` to, if one was named.
        expert: who acts in place of a policy.
        started: Unix time from which the run's clock counts: the start of the process, of the job in a sweep.
    """

    command: str
    config: dict[str, Any]
    overrides: list[str]
    run_dir: Path
    checkpoint: Path | None = None
    resume: Path | None = None
    out_file: Path | None = None
    expert: str | None = None
    started: float = field(default_factory=lambda: psutil.Process().create_time())


def compose(command: str, overrides: list[str], job: int | None = None) -> Invocation:
    """Resolve and check the configuration of `command`.

    Args:
        command: see `Invocation`.
        overrides: `key=value` in Hydra's grammar, each with one value (`expand` resolves sweeps).
        job: number of a sweep's job, appended to `out`.

    Raises:
        BadInput: anything is misspelt, of a wrong type, out of range, or a path does not hold what it should.
    """
    parsed = parse(overrides)
    expert = _expert(command, parsed)
    source = None if expert else _source(command, parsed)
    chosen = [one for one in parsed if one.key_or_group in GROUPS]
    values = [one for one in parsed if one.key_or_group not in (*GROUPS, *SOURCES, EXPERT)]
    usual: dict[str, Any] = {}
    if source is None:
        nodes, usual = _choose(chosen)
        saved: dict[str, Any] = {}
        if (begun := _start(command, values)) is not None and not any(one.key_or_group == "policy" for one in chosen):
            # that policy, as it was there, and not what a task usually takes
            nodes["policy"] = _load(folder_of(begun))[0]["policy"]
            usual = {key: value for key, value in usual.items() if not key.startswith("policy.")}
    else:
        nodes, saved = _load(folder_of(source))
    types = option_types({group: registry.find(group, name).options for group, (name, _) in nodes.items()})
    for one in values:
        if "task" in nodes or one.key_or_group.partition(".")[0] != "task":
            check_key(one.key_or_group, one.value(), types)
    if "task" not in nodes:
        valid = ", ".join(choices("task"))
        raise BadInput(f"task is missing: embodied {command} task={choices('task')[0]}; valid: {valid}")
    _check_used(command, source, chosen + values)

    config = _resolve(nodes, saved, usual, values, types)
    validate(config)
    for group in GROUPS:
        check = getattr(registry.find(group, config[group]["name"]).build, "validate", None)
        built = options(group, config)
        if check is not None:
            check(built, config["sim"]["num_worlds"]) if group == "algo" else check(built)

    out_file = None
    if source is not None and (config["out"] is None or command == "export"):
        run_dir = folder_of(source)
        out_file = None if config["out"] is None else Path(config["out"]).expanduser()
    else:
        stamp = f"{datetime.now():%Y%m%d-%H%M%S}-{config['seed']}"
        out = config["out"] if config["out"] is not None else f"runs/{config['task']['name']}/{stamp}"
        run_dir = Path(out if job is None else f"{out}-{job}").expanduser()
        if command not in MEASURES:
            check_new(run_dir)
    config["out"] = str(run_dir)
    return Invocation(
        command,
        config,
        list(overrides),
        run_dir,
        checkpoint=None if command == "train" else source,
        resume=source if command == "train" else None,
        out_file=out_file,
        expert=expert,
    )


def options(section: str, config: Mapping[str, Any]) -> Any:
    """The options dataclass of a group (`task`, `algo`, ...) or section (`sim`, `budget`, ...) of a plain config.

    Raises:
        BadInput: the group's name is not registered, or its dataclass refuses a value.
    """
    values = dict(config[section])
    name = values.pop("name") if section in GROUPS else None
    cls = get_type_hints(RunConfig)[section] if name is None else registry.find(section, name).options
    try:
        return with_tuples(OmegaConf.to_object(_structured(cls, values, section)))
    except (OmegaConfBaseException, ValueError) as error:
        raise BadInput(f"{section}: {_line(error)}") from error


def defaults(group: str, name: str) -> list[str]:
    """The options of the registered `name` as they are when nothing is given, each as a user would write it."""
    flat = []

    def walk(value: Any, key: str) -> None:
        if isinstance(value, dict) and value:
            for inner, content in value.items():
                walk(content, f"{key}.{inner}")
        else:
            flat.append(f"{key}={value if isinstance(value, str) else json.dumps(value)}")

    plain: Any = OmegaConf.to_container(OmegaConf.structured(registry.find(group, name).options), enum_to_str=True)
    for option, value in plain.items():
        walk(value, f"{group}.{option}")
    return flat


def to_yaml(config: Mapping[str, Any]) -> str:
    """A plain resolved config as the text of config.yaml."""
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)


def _source(command: str, parsed: list[Override]) -> Path | None:
    """The checkpoint file that `command` starts from, if any."""
    wanted = "resume" if command == "train" else "checkpoint" if command in ("eval", "play", "export", "collect") else None
    path = None
    for one in parsed:
        key, value = one.key_or_group, one.value()
        if key not in SOURCES:
            continue
        check_form(one)
        if key != wanted:
            users = "train continues a run" if key == "resume" else "eval, play, collect and export read a run"
            raise BadInput(f"{one.input_line}: {users} with {key}=; {command} does not")
        if path is not None:
            raise BadInput(f"{key}= is given twice")
        if not isinstance(value, str) or not value:
            raise BadInput(f"{one.input_line}: expected the path of a run folder or of one of its checkpoints")
        path = locate(key, value)
    if path is None and wanted == "checkpoint":
        run = newest()
        if run is None:
            raise BadInput(f"no run under runs/ to {command}: name one with checkpoint=, or embodied train task=...")
        path = locate("checkpoint", str(run))
    return path


def _expert(command: str, parsed: list[Override]) -> str | None:
    """Who acts in place of a policy, if that is asked for."""
    given = [one for one in parsed if one.key_or_group == EXPERT]
    if not given:
        return None
    for one in given:
        check_form(one)
    text, value = given[-1].input_line, str(given[-1].value())
    if command != "collect":
        raise BadInput(f"{text}: collect alone records an expert; {command} does not")
    if len(given) > 1:
        raise BadInput(f"{EXPERT}= is given twice")
    if value not in EXPERTS:
        raise BadInput(f"{text}: {nearest(value, EXPERTS)}")
    if any(one.key_or_group in SOURCES for one in parsed):
        raise BadInput(f"{text}: it acts in place of a run's policy: leave out checkpoint=, or {EXPERT}=")
    return value


def _start(command: str, values: list[Override]) -> Path | None:
    """The checkpoint file whose policy a training begins with, if any."""
    given = [one for one in values if one.key_or_group == "start" and one.value() is not None]
    if not given:
        return None
    if command != "train":
        raise BadInput(f"{given[0].input_line}: train begins with the policy of a run; {command} does not")
    return locate("start", str(given[0].value()))


def _load(run: Path) -> tuple[dict[str, tuple[str, DictConfig]], dict[str, Any]]:
    """A run's saved config: (name, options) of each group, and the rest."""
    file = run / "config.yaml"
    try:
        saved = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInput(f"{file} cannot be read: {error}") from error
    nodes = {}
    for group in GROUPS:
        values = saved.pop(group, None) if isinstance(saved, dict) else None
        if not isinstance(values, dict) or not isinstance(values.get("name"), str):
            raise BadInput(f"{file}: expected a resolved run configuration; '{group}' has no name")
        name = values.pop("name")
        nodes[group] = name, _structured(registry.find(group, name).options, values, str(file))
    saved.pop("out", None)  # the folder may have moved since
    return nodes, saved


def _choose(chosen: list[Override]) -> tuple[dict[str, tuple[str, DictConfig]], dict[str, Any]]:
    """(registered name, options) of each group: the user's choice, otherwise the task's usual one, otherwise the usual one;
    and the options that the task wants otherwise, as far as they are of what was chosen.
    """
    given = _given(chosen)
    usual: dict[str, Any] = {}
    if given.get("task") in registry.names("task"):
        usual = dict(registry.find("task", given["task"]).usual)
    names = CHOICES | {group: usual.pop(group) for group in GROUPS if group in usual}
    # options of what the user replaced by something else mean nothing
    other = {group for group, name in given.items() if name != names.get(group, name)}
    usual = {key: value for key, value in usual.items() if key.partition(".")[0] not in other}
    names |= given
    nodes = {}
    for group, choice in names.items():
        preset = presets(group).get(choice)
        if preset is None:
            if choice not in registry.names(group):
                raise BadInput(f"unknown {group} '{choice}': {nearest(choice, choices(group))}")
            nodes[group] = choice, _structured(registry.find(group, choice).options, {}, group)
        else:
            values = yaml.safe_load(preset.read_text(encoding="utf-8"))
            name = values.pop("name")
            nodes[group] = name, _structured(registry.find(group, name).options, values, str(preset))
    return nodes, usual


def _given(chosen: list[Override]) -> dict[str, str]:
    """What the user chose, by group."""
    given: dict[str, str] = {}
    for one in chosen:
        check_form(one)
        group, value = one.key_or_group, one.value()
        if group in given:
            raise BadInput(f"{group}= is given twice: {one.input_line} and another")
        if isinstance(value, list | dict):
            raise BadInput(f"{one.input_line}: expected one of {', '.join(choices(group))}")
        given[group] = "null" if value is None else str(value)
    return given


def _structured(cls: type, values: Mapping[str, Any], source: str) -> DictConfig:
    """A typed node of `cls` with `values`; `source` is named in errors."""
    node: Any = OmegaConf.structured(cls)
    OmegaConf.set_readonly(node, False)  # of a frozen dataclass
    try:
        node.merge_with(values)
    except (OmegaConfBaseException, ValueError) as error:
        raise BadInput(f"{source}: {_line(error)}") from error
    return node


def _check_used(command: str, source: Path | None, parsed: list[Override]) -> None:
    """Refuse what a command would not use, and what a saved run keeps."""
    if command == "train" and source is None:
        return
    free: tuple[str, ...]
    if command == "train":
        free, why = RESUMABLE, "a resumed run keeps its configuration"
    elif command == "collect" and source is None:
        free, why = EVALUABLE, "collect of a script trains nothing"
    elif source is None:
        free, why = MEASURED, f"{command} measures and keeps no run"
    else:
        free = ("out",) if command == "export" else EVALUABLE
        why = f"{command} of a saved run keeps its configuration"
    for one in parsed:
        head = one.key_or_group.partition(".")[0]
        if head not in free or (source is not None and one.key_or_group in GROUPS):
            names = [name if name in ("episodes", "seed", "out", "device") else f"{name}.*" for name in free]
            raise BadInput(f"{one.input_line}: {why} and accepts only {', '.join(names)}")


def _resolve(
    nodes: Mapping[str, tuple[str, DictConfig]],
    saved: Mapping[str, Any],
    usual: Mapping[str, Any],
    values: list[Override],
    types: Mapping[str, Any],
) -> dict[str, Any]:
    """Compose with Hydra, apply what the task wants otherwise and the overrides in their order, and make it plain."""
    root = _structured(RunConfig, saved, "the run's config.yaml")
    with open_dict(root):
        root.defaults = [*({group: name} for group, (name, _) in nodes.items()), "_self_"]
    with hydra.initialize(version_base="1.3", config_path=None), _config_store() as store:
        store.store(name="run", node=root)
        for group, (name, node) in nodes.items():
            store.store(group=group, name=name, node=node)
        cfg = hydra.compose("run")
    OmegaConf.set_struct(cfg, False)  # dict options take new keys; dataclasses still refuse them
    for key, wanted in usual.items():
        OmegaConf.update(cfg, key, wanted)
    for one in values:
        check_form(one)
        try:
            OmegaConf.update(cfg, one.key_or_group, one.value(), merge=True)
        except (OmegaConfBaseException, ValueError) as error:
            raise BadInput(f"{one.input_line}: {expected(one.key_or_group, types)}") from error
    try:
        plain: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        raise BadInput(f"{error.full_key}: {_line(error)}") from error
    for key, hint in types.items():
        value: Any = plain
        for part in key.split("."):
            value = value[part]
        check_value(key, value, hint)
    groups = {group: {"name": nodes[group][0], **plain.pop(group)} for group in GROUPS}
    return groups | plain


@contextmanager
def _config_store() -> Iterator[ConfigStore]:
    """Hydra's global store without groups of ours, given back as it was."""
    store = ConfigStore.instance()
    before = store.repo
    store.repo = {name: group for name, group in before.items() if name not in GROUPS}
    try:
        yield store
    finally:
        store.repo = before


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
