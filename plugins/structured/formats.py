"""Values of `format` that are enforced: those the library has right as they are, the others by a pattern or with a bound."""

from __future__ import annotations

from typing import Any

_DAY = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][48]|[13579][26]|[2468]0)00)"
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_LABEL = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"

FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},  # February 29 in leap years only
    "time": {"pattern": f"^{_TIME}$"},  # no leap seconds
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "hostname": {
        "format": "hostname",
        "maxLength": 253,
        "pattern": rf"^{_LABEL}(?:\.{_LABEL})*$",
    },  # no encoded Unicode (xn--...)
    "duration": {},
    "email": {},
    "ipv4": {},
    "ipv6": {},
    "uri": {},
    "uuid": {},
}
"""By name: what is handed to the library in its place; empty: the format itself."""
