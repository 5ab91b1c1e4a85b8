"""Figures as short texts."""

from __future__ import annotations


def compact(value: float) -> str:
    """1,234; 179.8k; 1.23M: at least four digits as they are, then three or four of them."""
    if abs(value) < 10_000:
        whole = round(value)
        return f"{whole:,}" if abs(value - whole) < 0.05 or abs(value) >= 100 else f"{value:.1f}"
    unit = next((unit for unit in range(3) if abs(value) < 999.5 * 1000 ** (unit + 1)), 3)
    value /= 1000 ** (unit + 1)
    return f"{value:.{4 if abs(value) >= 100 else 3}g}" + "kMGT"[unit]


def share(value: float, digits: int = 1) -> str:
    """0.8125 -> 81.2%; what is not nothing is never shown as 0 or as all."""
    text = f"{value:.{digits}%}"
    least = 10.0 ** -(digits + 2)
    if 0 < value < least / 2:
        return f"<{least:.{digits}%}"
    if 1 - least / 2 < value < 1:
        return f">{1 - least:.{digits}%}"
    return text


def times(value: float) -> str:
    """A ratio as text: 1.0834 -> 1.083."""
    return f"{value:.3f}"
