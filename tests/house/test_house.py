"""Rules of the house: who may import whom, what is packaged, what is public, and that documents say what is."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tokenbus
from tokenbus.core import hooks
from tokenbus.core.host import HOOK_NAMES

ROOT = Path(tokenbus.__file__).parent
PACKAGES = ("core", "plugins", "kernels", "testing")
SOURCES = sorted(path for top in PACKAGES for path in (ROOT / top).rglob("*.py"))
PLUGINS_MAY_USE = {
    "core.bus",
    "core.contexts",
    "core.errors",
    "core.front.events",
    "core.hooks",
    "core.kv.pool",
    "core.media",
    "core.messages",
    "core.models.base",
    "core.models.config",
    "core.models.cpu_linears",
    "core.models.linears",
    "core.models.media",
    "core.models.replace",
    "core.models.resolve",
    "core.models.sizing",
    "core.output",
    "core.params",
    "core.plan",
    "core.plugin",
    "core.policy",
    "core.recording.file",
    "core.recording.frames",
    "core.recording.hashing",
    "core.recording.identity",
    "core.recording.media",
    "core.recording.tracker",
    "core.request",
    "core.worker.attention",
    "core.worker.cpu_attention",
    "core.worker.paged",
    "core.worker.side",
    "core.worker.state",
    "core.worker.torch_attention",
    "core.worker.triton_attention",
}


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name):
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def imports_of(path):
    """Modules of this package that a file imports, with dots from the root ("core.plan"), whether or not under TYPE_CHECKING."""
    here = module_of(path).split(".")
    package = here if path.name == "__init__.py" else here[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                base = package[: len(package) - node.level + 1] + base
            elif base[:1] == ["tokenbus"]:
                base = base[1:]
            else:
                continue
            for alias in node.names:
                full = ".".join([*base, alias.name])
                yield full if is_module(full) else ".".join(base)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tokenbus":
                    yield alias.name.removeprefix("tokenbus").removeprefix(".")


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(ROOT / "core")], ids=module_of)
def test_core_does_not_import_plugins(path):
    assert [name for name in imports_of(path) if name.startswith(("plugins", "testing"))] == []


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(ROOT / "kernels")], ids=module_of)
def test_kernels_know_no_engine(path):
    assert [name for name in imports_of(path) if not name.startswith("kernels")] == []


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(ROOT / "plugins")], ids=module_of)
def test_plugins_use_only_what_third_parties_may(path):
    own = ".".join(module_of(path).split(".")[:2])
    for name in imports_of(path):
        assert name in PLUGINS_MAY_USE or name.startswith(("kernels", own)), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_imports_inside_the_package_are_relative(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not [name for name in names if name.split(".")[0] == "tokenbus"]


def test_the_list_of_packages_is_complete():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    real = ["tokenbus"] + [
        "tokenbus." + str(path.parent.relative_to(ROOT)).replace("/", ".")
        for top in PACKAGES
        for path in (ROOT / top).rglob("__init__.py")
    ]
    assert sorted(declared) == sorted(real)
    folders = {path.parent for path in SOURCES}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_public_names_are_exactly_these_and_exist():
    assert tokenbus.__all__ == [
        "HOOK_API_VERSION",
        "LLM",
        "Completion",
        "Plugin",
        "PluginInfo",
        "RequestOutput",
        "SamplingParams",
        "Stash",
        "StashKey",
        "TokenbusError",
        "__version__",
        "hookimpl",
    ]
    for name in tokenbus.__all__:
        assert getattr(tokenbus, name) is not None
    with pytest.raises(AttributeError):
        _ = tokenbus.nothing


def test_every_module_can_be_imported_alone_and_the_light_ones_stay_light():
    """One fresh interpreter imports each module after dropping all others of the package: no import order is needed."""
    modules = [
        "tokenbus." + module_of(path) for path in SOURCES if path.name != "__main__.py" and not path.name.endswith("_main.py")
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    for old in [m for m in sys.modules if m == 'tokenbus' or m.startswith('tokenbus.')]:\n"
        "        del sys.modules[old]\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    light = "import sys, tokenbus; assert not {'torch', 'transformers', 'aiohttp'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", light], check=True, timeout=60)


def test_architecture_names_every_package_and_nothing_else():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    real = {str(path.parent.relative_to(ROOT)) + "/" for path in SOURCES if path.name == "__init__.py"}
    named = set(re.findall(r"`([\w/]+/)`", text))
    assert real - named == set(), "packages that the document does not mention"
    assert {n for n in named if n.split("/")[0] in PACKAGES} - real == set(), "packages that do not exist"
    files = set(re.findall(r"`([\w/]+\.py)`", text))
    assert len(files) > 30
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_the_page_for_authors_names_every_hook_and_who_calls_it():
    text = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| \[`(\w+)`\]\(reference/hooks\.md#(\w+)\) \|", text, re.MULTILINE)
    assert [hook for _, hook, _ in rows] == list(HOOK_NAMES)
    for process, hook, anchor in rows:
        assert anchor == hook
        assert (getattr(hooks, hook).__doc__ or "").lower().startswith(process), f"{hook} is not called in the {process}"


def test_links_between_documents_lead_somewhere():
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            if not target.startswith(("http", "#", "/")):
                file, _, anchor = target.partition("#")
                found = (path.parent / file).resolve()
                assert found.exists(), f"{path.name}: {target}"
                if anchor and found.suffix == ".md":
                    headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
                    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
                    assert anchor in anchors, f"{path.name}: {target}; there are {sorted(anchors)}"


def test_reference_pages_are_what_the_source_says():
    spec = importlib.util.spec_from_file_location("gen_docs", ROOT / "scripts" / "gen_docs.py")
    assert spec is not None
    assert spec.loader is not None
    gen_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gen_docs)
    for name, page in gen_docs.PAGES.items():
        written = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert written == page(), f"docs/reference/{name} is out of date: run .venv/bin/python scripts/gen_docs.py"


def test_no_file_speaks_of_a_machine():
    """Paths and hosts of somebody's machine do not belong into the project."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ""} and path.is_file() and path != Path(__file__):
            text = path.read_text(encoding="utf-8", errors="replace")
            for word in ("/work/", "/root/", "/tmp/dev"):
                assert word not in text, f"{name} mentions {word}"
