from __future__ import annotations

from workers.rows.seeds import derive_seed


def test_seeds_are_the_same_in_every_version() -> None:
    assert derive_seed(0, 0, 0) == 3_089_510_136_382_904_638
    assert derive_seed(7, 123_456, 3) == 1_212_628_625_578_741_710


def test_seeds_differ_by_job_row_and_sample_and_fit_a_signed_integer() -> None:
    places = [(job, row, sample) for job in range(5) for row in range(100) for sample in range(4)]
    seeds = {derive_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
