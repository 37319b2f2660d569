"""Numbers as a view shows them: short, and as wide as they are wide."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """ "12.3 ms", "1.20 s"; "-" if there is none."""
    if value is None:
        return "-"
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f} us"
    if value < 0.9995:
        return f"{_three(value * 1e3)} ms"
    return f"{_three(value)} s"


def size(num_bytes: float | None) -> str:
    """ "1.02 GB", by powers of ten; "-" if there is none."""
    if num_bytes is None:
        return "-"
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= 0.9995 * unit:
            return f"{_three(num_bytes / unit)} {name}"
    return f"{num_bytes:.0f} B"


def speed(bytes_per_s: float | None) -> str:
    """ "19.6 GB/s"; "-" if there is none."""
    return "-" if bytes_per_s is None else f"{_three(bytes_per_s / 1e9)} GB/s"


def share(value: float | None) -> str:
    """ "93%"; "-" if there is none."""
    return "-" if value is None else f"{100 * value:.0f}%"


def count(number: float) -> str:
    """ "1,234"; from a hundred thousand on "123k"."""
    if number < 99_999.5:
        return f"{number:,.0f}"
    if number < 99_999_500:
        return f"{number / 1e3:,.0f}k"
    return f"{number / 1e6:,.0f}M"


def rate(number: float) -> str:
    """ "123", and of few ones their tenth too: "12.3"."""
    return f"{number:.1f}" if 0 < number < 99.95 else count(number)


def _three(value: float) -> str:
    """Three digits."""
    for limit, digits in ((9.995, 2), (99.95, 1)):
        if value < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"
