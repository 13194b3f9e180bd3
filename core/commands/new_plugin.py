"""`tokenbus new-plugin NAME`: writes the skeleton of a plugin package, which works and has a test. Nothing is installed."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from string import Template

from ..config import Config
from ..errors import ConfigError
from ..host import PluginHost, make_host
from ..plugin import HOOK_API_VERSION

NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")
MOST_CHARS = 64

PYPROJECT = Template("""[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$package"
version = "0.1.0"
description = "A plugin for Tokenbus."
requires-python = ">=3.11"
dependencies = ["tokenbus"]

[project.entry-points."tokenbus.plugins"]
"$name" = "$module:$cls"

[tool.setuptools]
py-modules = ["$module"]

[tool.pytest.ini_options]
testpaths = ["tests"]
""")

MODULE = Template('''"""The plugin `$name`: the request field `$field` makes tokens that the text has already less likely.

Install it (`pip install -e .`), then `tokenbus serve --enable $name`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from tokenbus import Plugin, PluginInfo, hookimpl
from tokenbus.core.errors import FieldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from tokenbus.core.worker.state import SampleRow


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[plugins."$name"] of tokenbus.toml."""

    most: float = 100.0
    """Largest value that a request may ask for."""


class $cls(Plugin):
    info = PluginInfo(
        name="$name",
        summary="tokens that were there already become less likely",
        scope="request",
        lossless=False,
        claims={"$field"},
        api_version=$api,
    )
    Settings = Settings

    @hookimpl
    def check_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Front: once for each API request that uses the field. What it returns travels on as `request.fields`."""
        value = fields["$field"]
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= self.settings.most:
            raise FieldError("$field", f"must be a number from 0 to {self.settings.most:g}, got {value!r}")
        return {"$field": float(value)}

    @hookimpl
    def adjust_logits(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        """Worker: each step, with a row for each request that uses the field. Each row from its own tokens only."""
        for i, row in enumerate(rows):
            logits[i, list(set(row.tokens))] -= row.request.fields["$field"]
''')

TEST = Template("""from __future__ import annotations

import pytest
from tokenbus.core.errors import FieldError
from tokenbus.testing import Request, TinyEngine

from $module import $cls


@pytest.fixture
def engine():
    engine = TinyEngine($cls)
    yield engine
    engine.close()


def test_nothing_comes_twice_when_it_is_strong(engine):
    fields = {"ignore_eos": True}
    plain = engine.generate("hello", max_tokens=40, fields=fields)
    assert len(set(plain.tokens)) < 40
    strong = engine.generate("hello", max_tokens=40, fields=fields | {"$field": 100})
    assert len(set(strong.tokens)) == 40


def test_only_the_request_that_asks_is_concerned(engine):
    plain = engine.generate("hello")
    answers = engine.run([Request("hello"), Request("hello", fields={"$field": 100})])
    assert answers[0].tokens == plain.tokens
    assert len(engine.called("adjust_logits", plugin="$name")) == 8


def test_preemption_and_chunks_change_nothing(engine):
    requests = [Request("hello " * k, 24, 0.8, seed=k, fields={"$field": 3}) for k in range(1, 6)]
    alone = [engine.run([request])[0].tokens for request in requests]
    crowded = engine.run(requests, blocks=20, chunk=5)
    assert engine.outcome.preempted > 0
    assert [answer.tokens for answer in crowded] == alone


@pytest.mark.parametrize("value", [-1, 101, "5", True])
def test_nonsense_is_the_clients_mistake(engine, value):
    with pytest.raises(FieldError) as caught:
        engine.generate("x", fields={"$field": value})
    assert caught.value.param == "$field"
""")

README = Template("""# $package

The plugin `$name` for Tokenbus.

    pip install -e .
    pytest
    tokenbus plugins
    tokenbus serve --enable $name

How to go on: "Plugins" in Tokenbus's documentation (docs/plugins.md), and the reference of all hooks beside it.
""")


def run(arguments: argparse.Namespace, config: Config) -> int:
    names = names_of(arguments.name, make_host("front", config))
    folder = Path(arguments.into) / names["package"]
    files = {
        folder / "pyproject.toml": PYPROJECT,
        folder / f"{names['module']}.py": MODULE,
        folder / "tests" / f"test_{names['module'].removeprefix('tokenbus_')}.py": TEST,
        folder / "README.md": README,
    }
    if folder.exists():
        raise ConfigError(f"{folder} exists already: nothing was written")
    for path, template in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(template.substitute(names), encoding="utf-8")
    sys.stdout.write("".join(f"{path}\n" for path in files))
    sys.stdout.write(f"\nnext: cd {folder} && pip install -e . && pytest, then tokenbus serve --enable {names['name']}\n")
    return 0


def names_of(name: str, host: PluginHost) -> dict[str, str]:
    """What the templates are filled with. ConfigError for a name that can't be a plugin's, or is one already."""
    from ..front.admission import CORE_FIELDS, WITHOUT_EFFECT

    if not NAME.fullmatch(name) or len(name) > MOST_CHARS:
        raise ConfigError(
            f"{name!r:.80} can't be a plugin's name: small letters, digits and underscores, with dots between families, "
            f"at most {MOST_CHARS} characters"
        )
    if name in host.catalogue or name in host.broken:
        raise ConfigError(f"a plugin is called {name!r} already")
    field = name.replace(".", "_")
    if owner := next(iter(host.claimers(field)), "core" if field in CORE_FIELDS | WITHOUT_EFFECT else None):
        raise ConfigError(f"the request field {field!r} belongs to {owner!r}: choose another name")
    return {
        "name": name,
        "field": field,
        "module": f"tokenbus_{field}",
        "package": f"tokenbus-{field.replace('_', '-')}",
        "cls": "".join(part.capitalize() for part in field.split("_")),
        "api": repr(HOOK_API_VERSION),
    }
