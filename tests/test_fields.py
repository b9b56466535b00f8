"""Annotations of fields: allowed values, and refusals of all others by name."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from zdc_jax.fields import check_fields


@dataclass
class Fields:
    """One field of each kind that configurations have."""

    count: int = 1
    number: float = 1.0
    flag: bool = True
    name: Literal["a", "b"] = "a"
    maybe: int | None = None
    ids: tuple[int, ...] = ()


ALLOWED = {
    "count": (0, -5, 2**31 - 1),
    "number": (1, -0.5, 1e300, 10**18),
    "flag": (False,),
    "name": ("b",),
    "maybe": (None, 7),
    "ids": ((), (1, 2)),
}
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "count": ((True, 1.0, "1", None, 2**31, [1]), "an integer from -2147483647 to 2147483647"),
    "number": ((float("nan"), float("inf"), 10**400, True, "1", None), "a finite number"),
    "flag": ((0, 1, "true", None), "true or false"),
    "name": (("c", 1, None, ["a"]), r"one of \('a', 'b'\)"),
    "maybe": (("1", 2.5, False), "an integer .* or None"),
    "ids": ((1, [1], (1, None), (2**31,)), "a list, each an integer"),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in ALLOWED for value in ALLOWED[name]])
def test_allowed(name, value):
    check_fields(Fields(**{name: value}))


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in REFUSED for value in REFUSED[name][0]])
def test_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}=.* must be {REFUSED[name][1]}"):
        check_fields(Fields(**{name: value}))
