"""Write numbers with their nouns."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """Return for example "1 thread" or "1,442 samples".

    Args:
        number: any number.
        noun: the noun in the singular.
    """
    if round(number) == 1:
        return f"1 {noun}"
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,.0f} {plural}"
