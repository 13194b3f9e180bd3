"""In which form a chat template takes contents: as texts, as lists of parts, or either.

Templates of models that read text only add strings together; many of models that see walk over a list of parts, and show nothing of
a content that is a string. What a template takes is found out by trying it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..media import Kind, MediaPart

PROBE = "Qprobe7x"


@dataclass(frozen=True, slots=True)
class ContentForm:
    texts: bool
    """It shows a content that is a string."""
    parts: bool
    """It shows one that is a list of parts."""

    def content(
        self, content: str | Sequence[str | MediaPart], hide: Callable[[str], str], markers: Mapping[Kind, str]
    ) -> str | list[dict[str, str]]:
        """A message's content as the template takes it. hide: applied to every text. markers: what stands for media in a string."""
        if isinstance(content, str):
            text = hide(content)
            return text if self.texts or not self.parts else [{"type": "text", "text": text}]
        if self.parts:
            return [{"type": "text", "text": hide(one)} if isinstance(one, str) else {"type": one.kind} for one in content]
        return "".join(hide(one) if isinstance(one, str) else markers[one.kind] for one in content)


def form_of(template: Any, names: Mapping[str, str]) -> ContentForm:
    """names: what templates refer to (bos_token and the like)."""
    texts, parts = _shown(template, names, PROBE), _shown(template, names, [{"type": "text", "text": PROBE}])
    return ContentForm(PROBE in texts, PROBE in parts and f"'{PROBE}'" not in parts)  # quoted: the list itself was printed


def _shown(template: Any, names: Mapping[str, str], content: Any) -> str:
    values = {"documents": None, "tools": None, **names, "add_generation_prompt": True}
    try:
        return template.render(values, messages=[{"role": "user", "content": content}])
    except Exception:
        return ""
