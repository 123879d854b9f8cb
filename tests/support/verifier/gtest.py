"""Likelihood-ratio tests of samples against a known law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

import numpy as np
from scipy import stats

ALPHA = 1e-6
"""Chance that a right sample is called wrong; seeds are fixed, so a test either always passes or never does."""


def p_value(samples: Iterable[Hashable], law: Mapping[Hashable, float]) -> float:
    """Of the G-test; cells with fewer than 5 expected are pooled. A sample that the law forbids gives 0."""
    found = Counter(samples)
    if any(law.get(outcome, 0.0) <= 0.0 for outcome in found):
        return 0.0
    total = sum(found.values())
    observed = np.array([found[outcome] for outcome in law], float)
    expected = total * np.array(list(law.values()))
    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    seen = observed > 0
    g = 2 * float((observed[seen] * np.log(observed[seen] / expected[seen])).sum())
    return float(stats.chi2.sf(g, int((expected > 0).sum()) - 1))
