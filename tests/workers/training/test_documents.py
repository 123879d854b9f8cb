"""Which answers are learned from, which are held out, and what is said of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workers.training.documents import SCHEMA, read_documents
from workers.training.errors import UnusableData
from workers.training.vocabulary import coverage, frequent_tokens


def answers(file: Path, rows: list[tuple[list[int], list[int]]]) -> Path:
    table = [{"prompt_token_ids": prompt, "output_token_ids": answer, "category": "x"} for prompt, answer in rows]
    pq.write_table(pa.Table.from_pylist(table, schema=SCHEMA), file)
    return file


def read(*files: Path, held_out: float = 0.0, **changes: Any) -> Any:
    return read_documents(files, **{"vocab_size": 100, "max_tokens": 20, "held_out": held_out, **changes})


def test_no_prompt_is_on_both_sides(tmp_path: Path) -> None:
    """Repeated prompts, with other answers, in another order, in another file."""
    rows = [([n % 50, 3, 5], [7, n % 90, 2]) for n in range(300)]
    found = read(answers(tmp_path / "a", rows), answers(tmp_path / "b", rows[::-1]), held_out=0.3)
    learned, out = ({document.prompt for document in part} for part in (found.learned, found.held_out))
    assert not learned & out
    assert len(learned) + len(out) == 50
    assert 5 <= len(out) <= 25
    assert len(found.learned) + len(found.held_out) == 600


def test_what_is_left_out_is_counted_by_reason(tmp_path: Path) -> None:
    rows = [([1], [2, 3]), ([], [2, 3]), ([1], [2]), ([1] * 19, [2, 3]), ([1] * 10, [2] * 30)]
    found = read(answers(tmp_path / "a", rows))
    assert [len(document) for document in found.learned] == [3, 20]
    assert found.unusable == {
        "without a prompt": 1,
        "shorter than 2 tokens": 1,
        "behind a prompt that alone reaches max_tokens (20)": 1,
    }


def test_data_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableData, match="another tokenizer"):
        read(answers(tmp_path / "a", [([1], [2, 100])]))
    with pytest.raises(UnusableData, match="no answer is left to learn from: 1 shorter than 2 tokens"):
        read(answers(tmp_path / "b", [([1], [2])]))
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "c")
    with pytest.raises(UnusableData, match="has no column prompt_token_ids"):
        read(tmp_path / "c")
    (tmp_path / "d").write_bytes(b"no Parquet")
    with pytest.raises(UnusableData, match="cannot be read as Parquet"):
        read(tmp_path / "d")


def test_the_digest_tells_tokens_split_and_boundaries_apart(tmp_path: Path) -> None:
    texts = [[([1, 2], [3, 4])], [([1], [2, 3, 4])], [([1, 2], [3, 5])]]
    digests = {read(answers(tmp_path / str(n), rows)).digest for n, rows in enumerate(texts)}
    assert len(digests) == 3


def test_the_vocabulary_is_that_of_the_answers(tmp_path: Path) -> None:
    documents = read(answers(tmp_path / "a", [([9] * 5, [7, 7, 3, 3, 5]), ([9], [7, 80])])).learned
    assert frequent_tokens(documents, 3, 100).tolist() == [3, 5, 7]
    assert frequent_tokens(documents, 6, 100).tolist() == [0, 1, 3, 5, 7, 80]
    assert coverage(documents, frequent_tokens(documents, 2, 100)) == pytest.approx(5 / 7)
