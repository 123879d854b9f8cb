"""Job files: YAML or JSON in, sections out; flags lie over them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from runner.errors import SpecError, UsageError
from storage.files.conversion import remedy


def read_spec_file(path: str | Path) -> dict[str, Any]:
    """Sections of a job file. Relative paths in it count from its own directory.

    Raises `UsageError` when it cannot be read and `SpecError` when it is not a mapping or has a key twice.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the job file {file}: {error}") from error
    data = _parse(file, text)
    if not isinstance(data, dict):
        raise SpecError(f"{file} must hold a mapping with the sections input, engine and sampling, not {data!r}")
    return absolute_paths(data, file.resolve().parent)


def load_yaml(text: str) -> Any:
    """The YAML value. Raises `yaml.YAMLError`, and `SpecError` that names every key that a mapping has twice."""
    loader = _UniqueKeyLoader(text)
    try:
        value = loader.get_single_data()
    finally:
        loader.dispose()
    if loader.repeated:
        raise SpecError(*loader.repeated)
    return value


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML forbids a key that is there twice; PyYAML takes the last one."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[str] = []

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                self.repeated.append(f"key {key.value!r} is there twice, again in line {key.start_mark.line + 1}")
            seen.add((key.tag, str(key.value)))
        return node


def _load_json(text: str) -> Any:
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        repeated.extend(f"key {key!r} is there twice in one object" for key, count in counts.items() if count > 1)
        return dict(pairs)

    value = json.loads(text, object_pairs_hook=unique)
    if repeated:
        raise SpecError(*repeated)
    return value


def _parse(file: Path, text: str) -> Any:
    try:
        return _load_json(text) if file.suffix == ".json" else load_yaml(text)
    except SpecError as error:
        raise SpecError(*(f"{file}: {problem}" for problem in error.problems)) from error
    except json.JSONDecodeError as error:
        lines = remedy(str(file)) if error.msg == "Extra data" else ""
        raise SpecError(f"{file} is not JSON: {error}{lines}") from error
    except yaml.YAMLError as error:
        raise SpecError(f"{file} is not YAML: {error}") from error


def absolute_paths(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """The same sections with local paths made absolute: workers have other directories."""
    result = {**data}
    section = result.get("input")
    if isinstance(section, Mapping) and "paths" in section:
        paths = section["paths"]
        paths = [paths] if isinstance(paths, str) else paths
        if isinstance(paths, list):
            result["input"] = {**section, "paths": [_input_path(p, base) for p in paths]}
    engine = result.get("engine")
    if isinstance(engine, Mapping):
        result["engine"] = {**engine, **_model_paths(engine, base, ("target",))}
        speculation = engine.get("speculation")
        if isinstance(speculation, Mapping):
            result["engine"]["speculation"] = {**speculation, **_speculation_paths(speculation, base)}
    return result


def _input_path(path: Any, base: Path) -> Any:
    if not isinstance(path, str) or "://" in path:
        return path
    return os.path.abspath(base / Path(path).expanduser())  # noqa: PTH100 (resolve would follow symbolic links)


def _speculation_paths(section: Mapping[str, Any], base: Path) -> dict[str, str]:
    found = _model_paths(section, base, ("draft",))
    file = section.get("skip_file")
    return {**found, "skip_file": _input_path(file, base)} if isinstance(file, str) else found


def _model_paths(section: Mapping[str, Any], base: Path, keys: tuple[str, ...]) -> dict[str, str]:
    """A model is a path when it is there; otherwise it is an alias or a hub id and stays as it is."""
    found: dict[str, str] = {}
    for key in keys:
        value = section.get(key)
        if isinstance(value, str) and ("/" in value or value.startswith(".") or value.endswith(".gguf")):
            path = base / Path(value).expanduser()
            if path.exists():
                found[key] = str(path.absolute())
    return found


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, section by section; None in `over` means not given."""
    result = {**base}
    for key, value in over.items():
        if value is None:
            continue
        current = result.get(key)
        if isinstance(value, Mapping):
            result[key] = merge(current if isinstance(current, Mapping) else {}, value)
        else:
            result[key] = value
    return {key: value for key, value in result.items() if value != {} or key in base}
