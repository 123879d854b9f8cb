"""Prompts that cannot fit are told without tokenising them, and no prompt that fits is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import Regex as Pattern
from transformers import PreTrainedTokenizerFast

from storage.spec import InputSpec, JobSpec
from workers.engine.api.config import EngineConfig
from workers.engine.text.tokenizer import HuggingFaceTokenizer
from workers.rows.prepare import PreparedRow, Preparer, RejectedRow
from workers.rows.prompt_length import in_groups
from workers.rows.read import Row

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACES = ["Ġ" * n for n in (2, 4, 8)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(*normaliser: normalizers.Normalizer, without: str = "") -> Tokenizer:
    vocabulary = [letter for letter in [*LETTERS, *SPACES] if letter != without]
    merges = [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("ĠĠĠĠ", "ĠĠĠĠ")]
    tokenizer = Tokenizer(models.BPE({name: token for token, name in enumerate(vocabulary)}, merges))
    tokenizer.normalizer = normalizers.Sequence(list(normaliser)) if normaliser else None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocabulary = {name: token for token, name in enumerate(["<unk>", *BYTES, "▁", "a", "b", "▁▁"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "▁")], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def no_fallback() -> Tokenizer:
    """Everything unknown is one token, however long."""
    vocabulary = {name: token for token, name in enumerate(["<unk>", "a", "b"])}
    return Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True))


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def swallowing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    return tokenizer


def dropping() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Pattern(r"\s+"), "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    return tokenizer


class Recording(HuggingFaceTokenizer):
    """A real tokenizer that remembers the longest text it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(PreTrainedTokenizerFast(tokenizer_object=tokenizer), frozenset())
        self.longest = 0

    def encode_batch(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        self.longest = max([self.longest, *map(len, texts)])
        return super().encode_batch(texts, special_tokens=special_tokens)


def texts() -> list[str]:
    rng = random.Random(0)
    alphabet = [
        " ",
        "  ",
        "\n",
        "a",
        "b",
        "é",
        "e\u0301",
        "\u1112\u1161\u11ab",
        "\u212a",
        "①",
        "漢",
        "😀",
        "ﷺ",
        "<|end|>",
    ]
    mixed = ["".join(rng.choices(alphabet, k=rng.randrange(1, 60))) for _ in range(200)]
    return [*mixed, " " * 999, "\u1112\u1161\u11ab" * 99, "😀" * 99, "<|end|>" + " " * 99]


KINDS: list[tuple[Callable[[], Tokenizer], bool]] = [
    (byte_level, True),
    (lambda: byte_level(normalizers.NFC()), True),
    (lambda: byte_level(normalizers.NFKC(), normalizers.Lowercase()), True),
    (byte_fallback, True),
    (lambda: byte_level(normalizers.StripAccents()), False),
    (lambda: byte_level(normalizers.Strip()), False),
    (lambda: byte_level(without="a"), True),
    (no_fallback, False),
    (words, False),
    (swallowing, False),
    (dropping, False),
]


@pytest.mark.parametrize(("make", "bounded"), KINDS)
def test_no_text_has_fewer_tokens_than_its_size_says(make: Callable[[], Tokenizer], bounded: bool) -> None:
    tokenizer = Recording(make())
    assert (tokenizer.min_tokens("ab" * 1000) > 0) == bounded
    for text in texts():
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode_batch([text], special_tokens=False)[0])


@pytest.mark.parametrize(("make", "bounded"), KINDS)
def test_a_prompt_far_too_long_is_not_tokenised_and_one_that_fits_is_kept(
    make: Callable[[], Tokenizer], bounded: bool
) -> None:
    tokenizer = Recording(make())
    spec = JobSpec(InputSpec(("x",), prompt_column="prompt"), {}, {}, chat_template=False)
    preparer = Preparer(spec, EngineConfig("fake"), tokenizer, 200)
    far, fits, spaces = preparer.prepare([Row(0, "ab " * 1_000_000), Row(1, "a b" * 40), Row(2, "a" + " " * 70_000)])
    assert isinstance(far, RejectedRow)
    assert far.code == "prompt_too_long"
    assert "context of 200" in far.message
    assert isinstance(fits, PreparedRow)
    assert tokenizer.longest <= 70_001
    vanish = len(tokenizer.encode_batch(["a" + " " * 70_000], special_tokens=False)[0]) < 200
    assert isinstance(spaces, PreparedRow) == vanish


def test_messages_are_measured_before_the_template_renders_them() -> None:
    rendered = []

    class Rendering(Recording):
        has_chat_template = True

        def render(self, messages: Sequence[Any], *, parse_content: bool = False) -> str:
            rendered.extend(message for message in messages if message["content"] != "-")
            return "rendered"

    spec = JobSpec(InputSpec(("x",), messages_column="messages"), {}, {})
    preparer = Preparer(spec, EngineConfig("fake"), Rendering(byte_level()), 200)
    long, padded = preparer.prepare(
        [
            Row(0, [{"role": "user", "content": "ab" * 10_000}]),
            Row(1, [{"role": "user", "content": "hi" + " " * 10_000}]),
        ]
    )
    assert isinstance(long, RejectedRow)
    assert long.code == "prompt_too_long"
    assert isinstance(padded, PreparedRow), "templates may strip what surrounds a text"
    assert len(rendered) == 1


def test_texts_are_tokenised_in_groups_of_bounded_size() -> None:
    sizes = [10, 600_000, 600_000, 2_000_000, 5, 5]
    groups = [[len(text) for text in group] for group in in_groups(["x" * size for size in sizes])]
    assert groups == [[10, 600_000], [600_000], [2_000_000], [5, 5]]
    assert list(in_groups([])) == []
