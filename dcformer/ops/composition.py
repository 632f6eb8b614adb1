"""The weights that mix heads: one `Composition` before the softmax, one after it.

B batch, T queries, S keys, N heads, R rank, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Composition(NamedTuple):
    """How the values of N heads at one (query, key) pair are mixed into N new ones.

    With x the vector of the heads' values at query i and key j (Section 3 of arXiv 2405.08553):

        y[m] = x[m] + sum_n x[n] base[n,m]
                    + sum_r (sum_n x[n] q1[i,r,n]) q2[i,r,m] + x[m] qg[i,m]
                    + sum_r (sum_n x[n] k1[j,r,n]) k2[j,r,m] + x[m] kg[j,m]

    Every part may be `None`; a missing part costs nothing. Heads mix only inside their group of N/G neighbours.

    Attributes:
        base: static mixing, [G, N/G, N/G], or `None`.
        query: query-wise mixing, [B, T, 2R+1, N], or `None`. Rows 0..R-1 are q1, rows R..2R-1 are q2, row 2R the gate.
        key: key-wise mixing, [B, S, 2R+1, N], or `None`, with rows as in `query`.
        groups: G, the number of groups that N splits into.
    """

    base: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    groups: int = 1

    @property
    def is_identity(self) -> bool:
        """Whether there is nothing to mix."""
        return self.base is None and self.query is None and self.key is None

    def map(self, function: Callable[[Tensor], Tensor]) -> Composition:
        """The composition with `function` applied to every part that is there."""
        base, query, key = (None if part is None else function(part) for part in self[:3])
        return Composition(base, query, key, self.groups)
