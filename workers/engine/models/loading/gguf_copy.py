"""GGUF files are converted once: a float32 copy in transformers' layout, kept in the user's cache directory.

transformers parses a GGUF file's vocabulary several times in Python and unpacks every weight, 15 s for a model of 135M
parameters; the copy loads in one. Delete the directory at any time; it is made again.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch

from workers.engine.api.cache_directory import cache_directory, make_cache
from workers.engine.api.errors import InvalidConfig
from workers.engine.api.phases import PercentReader, phase
from workers.engine.models.loading.completeness import check_filled
from workers.engine.models.loading.reading import read_tokenizer
from workers.engine.models.loading.refusals import refusing
from workers.engine.models.loading.sources import Source, quiet

VERSION = 2
"""Raise it when the conversion changes."""
JOINED = re.compile(r"_exps\.|\.ssm_")
"""Tensors that transformers renames, splits or joins one by one."""


def described(source: Source) -> Source:
    """Where config and tokenizer of a model are read fastest: in the copy of a GGUF file if it was made, else there."""
    return Source(source.name, copy) if source.is_gguf and (copy := _place(source)).is_dir() else source


def converted(source: Source) -> Source:
    """The copy of a GGUF model, made if need be; raises `InvalidConfig` when the cache directory cannot be written.

    Any other model as it is.
    """
    if not source.is_gguf:
        return source
    target = _place(source)
    if not target.is_dir():
        try:
            make_cache(target.parent)
            work = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
        except OSError as error:
            raise InvalidConfig(
                f"{source.name}: cannot write a converted copy to {target.parent} ({error}); set NIGHTDRAFT_CACHE"
            ) from error
        try:
            _convert(source, work)
            _publish(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return Source(source.name, target)


def _place(source: Source) -> Path:
    return cache_directory() / "models" / f"{source.content_hash()}-v{VERSION}"


def _convert(source: Source, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    # The unpacking loop draws a progress bar that no setting turns off.
    with (
        phase(f"converting {source.path.name}", once=True) as converting,
        refusing(source.name),
        quiet(),
        redirect_stderr(PercentReader(converting)),
        source.directory() as location,
    ):
        tokenizer = read_tokenizer(source)
        model, info = AutoModelForCausalLM.from_pretrained(
            location,
            gguf_file=source.path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        check_filled({**info, "unexpected_keys": [*info["unexpected_keys"], *_left_out(source, model)]}, source.name)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        tokenizer.save_pretrained(directory)
        model.save_pretrained(directory)


def _left_out(source: Source, model: Any) -> list[str]:
    """Tensors of the file that transformers' older reader skips without a word, rotary factors among them."""
    from gguf import GGUFReader
    from transformers.integrations.gguf.utils import is_gguf_arch_supported
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    reader = GGUFReader(source.path)
    architecture = reader.get_field("general.architecture").contents()
    if is_gguf_arch_supported(architecture):  # read by the newer one, which reports them
        return []
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    known = get_gguf_hf_weights_map(model, processor)
    return [tensor.name for tensor in reader.tensors if tensor.name not in known and not JOINED.search(tensor.name)]


def _publish(work: Path, target: Path) -> None:
    """Give a finished copy its name in one step; another process may have been faster."""
    try:
        work.rename(target)
    except OSError:
        if not target.is_dir():
            raise
