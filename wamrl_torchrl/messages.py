"""Wording that messages share."""

from __future__ import annotations

from collections.abc import Iterable


def first_few(items: Iterable[object], *, most: int = 5, separator: str = "; ") -> str:
    """The first ``most`` items, joined, and how many more there are."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more
