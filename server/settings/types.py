"""Converters for setting values: from the text of a flag or variable, or from a value of the configuration
file, to the checked Python value. Each raises ValueError that says what was expected. Imports the standard
library only."""

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

Converter = Callable[[object], object]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b?|b)?\s*", re.IGNORECASE)
_EXPONENT = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def parse_size(value: object) -> int:
    """Bytes from an integer or text such as "2GiB", "512MiB", "1.5g" (powers of 1024) or "2GB" (powers of
    1000)."""
    if isinstance(value, int) and not isinstance(value, bool):
        number, unit = float(value), ""
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f"expected a size such as 2GiB or 512MiB, got {value!r}")
        number, unit = float(match[1]), (match[2] or "").lower()
    base = 1000 if len(unit) == 2 and unit.endswith("b") else 1024
    size = int(number * base ** _EXPONENT[unit.rstrip("b").rstrip("i")])
    if size < 1:
        raise ValueError(f"expected a size above 0, got {value!r}")
    return size


def text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected text, got {value!r}")
    return value


def texts(value: object) -> tuple[str, ...]:
    """A list, or text with commas between the elements."""
    if isinstance(value, str):
        given, value = value, [part.strip() for part in value.split(",") if part.strip()]
        if not value:  # not the same as no value: a key that is only commas must not open the server to all
            raise ValueError(f"expected texts separated by commas, got {given!r}")
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a list of texts, got {value!r}")
    return tuple(text(element) for element in value)


def path(value: object) -> Path:
    return value if isinstance(value, Path) else Path(text(value)).expanduser()


def existing_file(value: object) -> Path:
    file = path(value)
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    return file


def boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in _TRUE | _FALSE:
        raise ValueError(f"expected true or false, got {value!r}")
    return word in _TRUE


def integer(minimum: int, maximum: int | None = None) -> Converter:
    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def convert(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,18}\s*", value):
            value = int(value)
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or value < minimum
            or (maximum is not None and value > maximum)
        ):
            raise ValueError(f"expected an integer {limits}, got {value!r}")
        return value

    return convert


def number(minimum: float) -> Converter:
    def convert(value: object) -> float:
        try:
            result = (
                float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None
            )
        except ValueError:
            result = None
        if result is None or not minimum <= result < float("inf"):
            raise ValueError(f"expected a number of at least {minimum:g}, got {value!r}")
        return result

    return convert


def share(value: object) -> float:
    """A number above 0 and at most 1."""
    try:
        result = number(0)(value)
    except ValueError:
        result = 0.0
    if not isinstance(result, float) or not 0 < result <= 1:
        raise ValueError(f"expected a number above 0 and at most 1, got {value!r}")
    return result


def ascending_numbers(value: object) -> tuple[float, ...]:
    """Numbers above 0 in ascending order: a list, or text with commas or blanks between them."""
    elements = re.split(r"[\s,]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(elements, (list, tuple)):
        raise ValueError(f"expected numbers separated by commas, got {value!r}")
    numbers = [
        number(0)(part)
        for element in elements
        for part in (element.split(",") if isinstance(element, str) else [element])
    ]
    result = tuple(part for part in numbers if isinstance(part, float))
    if not result or result[0] <= 0 or any(low >= high for low, high in pairwise(result)):
        raise ValueError(f"expected ascending numbers above 0, got {value!r}")
    return result


def url(value: object) -> str:
    address = text(value)
    if not re.fullmatch(r"https?://[^\s/?#]+[^\s?#]*", address):
        raise ValueError(f"expected an address such as http://localhost:4318, got {address!r}")
    return address


def choice(allowed: tuple[str, ...], refused: Mapping[str, str] | None = None) -> Converter:
    """One of ``allowed``; a name in ``refused`` is known, and its text says why it is not accepted."""

    def convert(value: object) -> str:
        name = value.strip().lower() if isinstance(value, str) else ""
        if refused and name in refused:
            raise ValueError(f"{value!r} is not supported: {refused[name]}")
        if name not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}, got {value!r}")
        return name

    return convert
