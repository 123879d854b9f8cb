"""Sampling parameters of a row: the job's, with the row's own put over them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from storage.spec import JobSpec
from storage.suggest import did_you_mean
from workers.engine.api.errors import InvalidParams
from workers.engine.api.sampling_params import FIELD_NAMES, SamplingParams
from workers.engine.api.tokenizer import TextTokenizer
from workers.errors import BadRow, InvalidSpec
from workers.rows.texts import check_text

_CACHED_ROWS = 4096
"""Distinct JSON strings remembered: datasets repeat a few settings over many rows."""
_CACHED_CHARACTERS = 4096
"""Longer ones are not."""
_MOST_CHARACTERS = 1 << 20


class SamplingMerger:
    """Merges rows' sampling parameters over the job's. Raises `InvalidSpec` when the job's own are wrong."""

    def __init__(self, spec: JobSpec, tokenizer: TextTokenizer) -> None:
        self._job_params = spec.sampling
        self._num_samples = spec.num_samples
        self._tokenizer = tokenizer
        self._cache: dict[str, SamplingParams] = {}
        self._word_ids: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}
        try:
            self._base = self._build({})
        except (InvalidParams, BadRow) as error:
            raise InvalidSpec(f"sampling: {error}") from error

    def merge(self, value: Any) -> SamplingParams:
        """Parameters of a row whose column holds `value`: null, a struct, a map or a JSON string.

        Raises `BadRow` (invalid_params) for an unknown key, with the nearest known one, and for a bad value.
        """
        if value is None:
            return self._base
        if isinstance(value, str):
            return self._merge_json(value)
        row_params = _as_dict(value)
        if not row_params:
            return self._base
        try:
            return self._build(row_params)
        except InvalidParams as error:
            raise BadRow(error.code, str(error)) from error

    def _merge_json(self, text: str) -> SamplingParams:
        cached = self._cache.get(text)
        if cached is not None:
            return cached
        if len(text) > _MOST_CHARACTERS:
            raise BadRow("invalid_params", f"sampling parameters must be short, got {len(text):,} characters")
        try:
            value = json.loads(text)
        except ValueError as error:
            raise BadRow("invalid_params", f"sampling parameters are not valid JSON: {error}") from error
        if isinstance(value, str):
            raise BadRow("invalid_params", "sampling parameters must be a JSON object, got a string")
        params = self.merge(value)
        if len(self._cache) < _CACHED_ROWS and len(text) <= _CACHED_CHARACTERS:
            self._cache[text] = params
        return params

    def _build(self, row_params: Mapping[str, Any]) -> SamplingParams:
        values = {**self._job_params, **row_params}
        for key in values:
            if key not in FIELD_NAMES:
                raise InvalidParams(f"unknown sampling parameter {key!r}{did_you_mean(str(key), FIELD_NAMES)}")
        values["bad_words"] = self._tokenise_words(values.get("bad_words") or ())
        params = SamplingParams(**{**values, "n": values.get("n", self._num_samples)})
        for text in params.stop:
            check_text(text, "stop")
        if params.n != self._num_samples:
            raise InvalidParams(f"n is the job's, {self._num_samples}, and cannot differ by row; got {params.n}")
        return params

    def _tokenise_words(self, words: Any) -> tuple[tuple[int, ...], ...]:
        """Each word as it starts a text and as it follows a space: tokenizers tell the two apart."""
        if isinstance(words, str) or not all(isinstance(word, str) for word in words):
            raise InvalidParams(f"bad_words must be a list of strings, got {words!r}")
        key = tuple(words)
        if key and key not in self._word_ids:
            for word in key:
                check_text(word, "bad_words")
            forms = [form for word in key for form in (word, " " + word.lstrip())]
            ids = self._tokenizer.encode_batch(forms, special_tokens=False)
            self._word_ids[key] = tuple(dict.fromkeys(tuple(sequence) for sequence in ids))
        return self._word_ids[key] if key else ()


def _as_dict(value: Any) -> dict[str, Any]:
    """A struct (null fields left out), a map (pyarrow gives its pairs) or a JSON object as a dict."""
    if isinstance(value, list):
        with suppress(TypeError, ValueError):
            value = dict(value)
    if not isinstance(value, dict):
        kinds = "a struct, a map or a JSON object"
        raise BadRow("invalid_params", f"sampling parameters must be {kinds}, got {value!r}")
    return {str(key): item for key, item in value.items() if item is not None}
