"""The option `cluster=inline`."""

from __future__ import annotations


class Inline:
    """`cluster=inline`: no cluster; one rank in this process."""
