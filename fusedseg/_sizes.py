"""Sizes of memory as texts, such as "16GiB"."""

import re

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{prefix}iB": 2**power for prefix, power in (("K", 10), ("M", 20), ("G", 30), ("T", 40))
}

# How many digits follow the point.
DIGITS = {"GiB": 2, "MiB": 1, "KiB": 1, "B": 0}


def bytes_in(text: str) -> int:
    """The bytes of a text such as "16GiB", "24 GB" or "800MiB"; 0 if the text cannot be read."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    unit = next((unit for unit in UNITS if match and unit.lower() == match[2].lower()), None)
    return int(float(match[1]) * UNITS[unit]) if match and unit else 0


def parse_bytes(op: str, value: int | str) -> int:
    """The bytes of a text such as "16GiB", or of a number of bytes.

    Raises:
        ValueError: the text cannot be read, or the size is not positive.  The error names the function ``op``, whose
            argument is ``budget``.
    """
    nbytes = value if isinstance(value, int) else bytes_in(value)
    if nbytes <= 0:
        raise ValueError(
            f"{op}: budget must be a positive number with one of {', '.join(UNITS)}, such as 16GiB, got {value!r}"
        )
    return nbytes


def text_of(nbytes: float) -> str:
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if nbytes >= UNITS[unit]), "B")
    return f"{nbytes / UNITS[unit]:.{DIGITS[unit]}f} {unit}"


def change_text(label: str, before: int, after: int) -> str:
    """A line of a report: the bytes before and after a change."""
    ratio = f" ({after / before:.2f})" if before else ""
    return f"  {label:<18}{text_of(before):>12} -> {text_of(after)}{ratio}"
