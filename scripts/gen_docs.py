"""Writes docs/reference/*.md from the source: settings, hooks, errors, metrics, plugins. A test compares the files with this output."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

import tokenbus
from tokenbus.core import config, errors, hooks
from tokenbus.core.experiments import config as experiments
from tokenbus.core.host import HOOK_NAMES, PluginHost
from tokenbus.core.plugin import ENTRY_POINT_GROUP, HOOK_API_VERSION

ROOT = Path(tokenbus.__file__).parent
OUT = ROOT / "docs" / "reference"


def attribute_docs(path: Path) -> dict[str, dict[str, tuple[str, str, str]]]:
    """For each class in a file: field name -> (type, default, docstring that follows it), as written."""
    found: dict[str, dict[str, tuple[str, str, str]]] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ClassDef):
            continue
        fields = found.setdefault(node.name, {})
        for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = ""
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                    text = " ".join(after.value.value.split())
                default = ast.unparse(statement.value) if statement.value else ""
                fields[statement.target.id] = (ast.unparse(statement.annotation), default, text)
    return found


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def settings_page() -> str:
    docs = attribute_docs(ROOT / "core" / "config.py")
    lines = [
        "# Settings",
        "",
        "One table for `tokenbus.toml`, the command line (`--token-budget` for `[scheduler] token_budget`) and Python.",
        "A plugin's own settings stand in `[plugins.NAME]`.",
        "",
    ]
    for section, (annotation, _, _) in docs["Config"].items():
        if section in {"plugins", "experiments"}:
            continue
        lines += [f"## [{section}]", ""]
        if text := getattr(config, annotation).__dict__.get("__doc__"):  # its own, not a base class's
            lines += [inspect.cleandoc(text), ""]
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        for name, (kind, default, text) in docs[annotation].items():
            lines.append(f"| `{name}` | `{cell(kind)}` | `{cell(default)}` | {cell(text)} |")
        lines.append("")
    experiment = attribute_docs(ROOT / "core" / "experiments" / "config.py")
    for title, struct in (("", "ExperimentConfig"), (".arms.ARM", "ArmConfig"), (".guard", "GuardConfig")):
        lines += [f"## [experiments.NAME{title}]", ""]
        if text := getattr(experiments, struct).__dict__.get("__doc__"):
            lines += [inspect.cleandoc(text), ""]
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        for name, (kind, default, text) in experiment[struct].items():
            lines.append(f"| `{name}` | `{cell(kind)}` | `{cell(default)}` | {cell(text)} |")
        lines.append("")
    host = catalogue()
    lines += ["## Plugins' settings", "", "| plugin | setting | default | meaning |", "|---|---|---|---|"]
    for name, cls in sorted(host.catalogue.items()):
        source = Path(inspect.getfile(cls.Settings))
        for field, (_, default, text) in attribute_docs(source).get(cls.Settings.__name__, {}).items():
            lines.append(f"| `{name}` | `{field}` | `{cell(default)}` | {cell(text)} |")
    return "\n".join(lines) + "\n"


def hooks_page() -> str:
    lines = [
        "# Hooks",
        "",
        f"Hook API version {HOOK_API_VERSION[0]}.{HOOK_API_VERSION[1]}.",
        "",
        inspect.getdoc(hooks) or "",
        "",
    ]
    for name in HOOK_NAMES:
        spec = getattr(hooks, name)
        signature = str(inspect.signature(spec)).replace("'", "")
        first = "; the first answer counts" if getattr(spec, "tokenbus_spec", {}).get("firstresult") else ""
        lines += [f"## {name}", "", f"`{name}{signature}`{first}", "", inspect.getdoc(spec) or "", ""]
    return "\n".join(lines)


def errors_page() -> str:
    return "# Errors\n\n```text\n" + (inspect.getdoc(errors) or "") + "\n```\n"


def metrics_page() -> str:
    from tokenbus.core.bus import Bus
    from tokenbus.core.contexts import FrontContext
    from tokenbus.plugins.metrics import MetricsSettings
    from tokenbus.plugins.metrics.collector import Collector

    collector = Collector(FrontContext(bus=Bus(), config=config.Config(), info=lambda: None), MetricsSettings())
    lines = ["# Metrics", "", "Prometheus, at `/metrics`, while the plugin `metrics` is on.", ""]
    lines += ["| metric | type | meaning |", "|---|---|---|"]
    for family in sorted(collector.registry.collect(), key=lambda f: f.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"| `{name}` | {family.type} | {family.documentation} |")
    return "\n".join(lines) + "\n"


def plugins_page() -> str:
    lines = ["# Built-in plugins", "", f"Entry-point group `{ENTRY_POINT_GROUP}`.", ""]
    lines += [
        "| plugin | on by default | scope | lossless | slot | fields it honours | what it does |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cls in sorted(catalogue().catalogue.items()):
        info = cls.info
        claims = ", ".join(f"`{c}`" for c in sorted(info.claims))
        yes = ("no", "yes")
        lines.append(
            f"| `{name}` | {yes[info.default]} | {info.scope} | {yes[info.lossless]} | {info.slot or ''} | {claims} | {info.summary} |"
        )
    return "\n".join(lines) + "\n"


def catalogue() -> PluginHost:
    host = PluginHost("front")
    host.discover()
    for name in [n for n, source in host.sources.items() if source != "tokenbus"]:
        del host.catalogue[name]
    return host


PAGES = {
    "settings.md": settings_page,
    "hooks.md": hooks_page,
    "errors.md": errors_page,
    "metrics.md": metrics_page,
    "plugins.md": plugins_page,
}


def main() -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (OUT / name).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
