"""Seeds derived from names, so that random numbers do not depend on the partition."""

from __future__ import annotations

import hashlib

__all__ = ["seed_of"]


def seed_of(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part (SHA-256 of their text)."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
