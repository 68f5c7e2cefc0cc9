"""A retriever in memory: BM25 over a list of documents."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence


class BM25:
    """Rank documents by BM25 (Robertson and Zaragoza 2009, doi:10.1561/1500000019), where ``ln(1 + (N - n + 0.5) / (n +
    0.5))`` is the weight of a word that n of N documents have.

    Args:
        documents: the texts.
        k1: how soon further occurrences of a word stop counting.
        b: how much long documents are discounted, from 0 to 1.
    """

    def __init__(self, documents: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        self._documents, self._k1, self._b = documents, k1, b
        self._counts = [Counter(_words(text)) for text in documents]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._frequency = Counter(word for counts in self._counts for word in counts)

    def scores(self, query: str) -> list[float]:
        """The score of each document."""
        mean = sum(self._lengths) / max(1, len(self._lengths)) or 1.0
        found = [0.0] * len(self._documents)
        for word in set(_words(query)):
            n = self._frequency[word]
            weight = math.log(1 + (len(found) - n + 0.5) / (n + 0.5))
            for i, counts in enumerate(self._counts):
                norm = self._k1 * (1 - self._b + self._b * self._lengths[i] / mean)
                found[i] += weight * counts[word] * (self._k1 + 1) / (counts[word] + norm)
        return found

    def top(self, query: str, count: int) -> list[str]:
        """The best documents that have a word of the query, at most `count`."""
        scores = self.scores(query)
        ranked = sorted(range(len(scores)), key=lambda i: -scores[i])
        return [self._documents[i] for i in ranked[:count] if scores[i] > 0]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
