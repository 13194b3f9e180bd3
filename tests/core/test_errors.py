from __future__ import annotations

import re

import msgspec
import pytest

from tokenbus.core import errors


def every_error():
    found, todo = [], [errors.TokenbusError]
    while todo:
        cls = todo.pop()
        found.append(cls)
        todo.extend(cls.__subclasses__())
    return found


def test_the_drawn_tree_is_the_real_one():
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"[\s│├└─]*(\w+)\s+(\d{3}|\(exit 1\)|\S)", line):
            drawn[match[1]] = match[2]
    for cls in every_error():
        assert cls.__name__ in drawn, f"{cls.__name__} is missing from the drawing"
        if not issubclass(cls, errors.StartupError):
            assert drawn[cls.__name__] == str(cls.status) or cls is errors.TokenbusError, cls.__name__


@pytest.mark.parametrize("cls", every_error(), ids=lambda c: c.__name__)
def test_every_error_survives_the_wire(cls):
    if issubclass(cls, errors.FieldError):
        error = cls("top_p", "too big", plugin="sampling")
        assert error.param == "top_p"
        assert "'top_p': too big" in str(error)
    else:
        error = cls("what happened", request_id="r1", hook="h", retry_after=2.0)
    back = errors.from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(error.to_wire()), type=errors.ErrorInfo))
    assert type(back) is cls
    assert back.to_wire() == error.to_wire()


def test_an_unknown_kind_is_a_server_fault():
    assert type(errors.from_wire(errors.ErrorInfo(kind="os.system", message="m"))) is errors.ServerFault
