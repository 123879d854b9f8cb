"""Where a calibrated skip set is kept: a small JSON file that names the model it was made for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from workers.engine.api.cache_directory import cache_directory, make_cache
from workers.engine.api.config import SpeculationConfig
from workers.engine.api.errors import InvalidConfig, NoSkipSet

if TYPE_CHECKING:
    from workers.engine.models.executor import Model


def a_file_decides(speculation: SpeculationConfig) -> bool:
    """Whether what method self skips is left to a file: the one that is named, or what was calibrated here."""
    return "self" in speculation.methods and speculation.skip is None and speculation.exit_layer is None


@dataclass(frozen=True, slots=True)
class SkipFile:
    """A skip set, the model it belongs to, and what it promised when it was found."""

    target: str
    content_hash: str
    skip: tuple[str, ...]
    acceptance: float
    """Of one drafted token: mean overlap of the two distributions, 0 to 1."""
    cost: float
    """Time of a draft pass by that of a full pass."""
    draft_tokens: int
    """The length for which the speedup is predicted."""
    predicted_speedup: float

    @classmethod
    def read(cls, path: str | Path) -> SkipFile:
        """Raises `NoSkipSet` when the file is not there, `InvalidConfig` when it is not of this kind; both name it."""
        try:
            values = json.loads(Path(path).read_text())
            return cls(**{**values, "skip": tuple(map(str, values["skip"]))})
        except FileNotFoundError as error:
            raise NoSkipSet(f"skip_file {path}: {error.strerror}") from error
        except OSError as error:
            raise InvalidConfig(f"skip_file {path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError) as error:
            wanted = ", ".join(field.name for field in fields(cls))
            raise InvalidConfig(f"skip_file {path} is no calibrated skip set, with {wanted} ({error})") from error

    @classmethod
    def find(cls, target: Model) -> SkipFile | None:
        """What was calibrated for this model on this machine, if anything.

        The hash, for which weights may be downloaded, is not asked for where nothing was calibrated at all.
        """
        if not any(cls._directory().glob("*-self.json")):
            return None
        path = cls.default_path(target.content_hash)
        return cls.read(path) if path.is_file() else None

    @classmethod
    def default_path(cls, content_hash: str) -> Path:
        return cls._directory() / f"{content_hash}-self.json"

    @staticmethod
    def _directory() -> Path:
        return cache_directory() / "calibration"

    def write(self, path: str | Path | None = None) -> Path:
        """Store it, by default where `find` looks; returns where. Raises `InvalidConfig` when it cannot."""
        place = Path(path) if path else self.default_path(self.content_hash)
        try:
            make_cache(place.parent)
            place.write_text(json.dumps(asdict(self), indent=2) + "\n")
        except OSError as error:
            raise InvalidConfig(f"cannot write {place}: {error.strerror}") from error
        return place

    def check(self, target: Model) -> None:
        """Raise `InvalidConfig` unless it was made for these weights."""
        if self.content_hash != target.content_hash:
            raise InvalidConfig(
                f"the skip set was calibrated for {self.target} ({self.content_hash[:12]}), but the target is "
                f"{target.name} ({target.content_hash[:12]}): run `nightdraft calibrate --method self "
                f"--target {target.name}`"
            )
