"""Seeds of rows that bring none: a stable mix, the same on every machine and in every version."""

from __future__ import annotations

from hashlib import blake2b
from struct import pack

_SEED_BITS = 63
"""One bit short of 64, so that a seed fits the signed BIGINT that the store keeps it in."""


def derive_seed(job_seed: int, row_index: int, sample: int) -> int:
    """Seed of one (row, sample): depends on the job's seed and the row's place, never on chunk, worker or time."""
    words = pack("<QQQ", job_seed % 2**64, row_index, sample)
    digest = blake2b(words, digest_size=8, person=b"nightdraft").digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
