"""Patterns and formats of strings, in the form that llguidance holds."""

from __future__ import annotations

# ECMAScript's dot leaves out all ends of lines.
_DOT = r"[^\n\r\u2028\u2029]"
# Doubled, these are operators inside a class of Rust's syntax.
_OPERATORS = "&-~"

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTHS = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    f"02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_FOURTHS}|{_FOURTHS}00)-02-29)"
)
# Without the second 60, which only some days have.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

FORMATS: dict[str, tuple[str | None, str | None]] = {
    "date": (None, f"^{_DATE}$"),
    "time": (None, f"^{_TIME}$"),
    "date-time": (None, f"^{_DATE}[tT]{_TIME}$"),
    "duration": ("duration", None),
    "email": ("email", None),
    "hostname": ("hostname", "^.{1,253}$"),
    "ipv4": ("ipv4", None),
    "ipv6": ("ipv6", None),
    "uri": ("uri", None),
    "uuid": ("uuid", None),
    **{f"uuid{version}": ("uuid", f"^.{{14}}{version}.{{4}}[89abAB]") for version in (1, 3, 4, 5)},
}
"""Formats that replies are held to: llguidance's name, and a pattern in addition or alone."""

_UNHELD = """
    password byte binary int32 int64 float double
    uri-reference uri-template iri iri-reference idn-email idn-hostname json-pointer relative-json-pointer regex
"""
UNHELD_FORMATS = frozenset(_UNHELD.split())
"""Formats that are only annotations, as JSON Schema permits."""


def as_llguidance(pattern: str) -> str:
    """An ECMAScript pattern in Rust's syntax."""
    parts: list[str] = []
    place, inside = 0, False
    while place < len(pattern):
        letter = pattern[place]
        if letter == "\\":
            parts.append(pattern[place : place + 2])
            place += 2
            continue
        if not inside and letter == ".":
            parts.append(_DOT)
        elif inside and (letter == "[" or (letter in _OPERATORS and parts[-1] == letter)):
            parts.append("\\" + letter)
        else:
            parts.append(letter)
        if not inside and letter == "[":
            inside = True
            if pattern.startswith("[^", place):
                parts.append("^")
                place += 1
        elif inside and letter == "]":
            inside = False
        place += 1
    return "".join(parts)
