"""MkDocs' hooks: add the generated pages and the repository's own, and mend links that leave docs/."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
OWN = {"architecture": "ARCHITECTURE.md", "contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """List every decision in the navigation."""
    decisions = sorted(path.name for path in (ROOT / "docs/decisions").glob("*.md"))
    config["nav"][-1]["Develop"].append({"Decisions": [f"decisions/{name}" for name in decisions]})
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    from docs.site.reference import PAGES

    for name, make in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=make()))
    for name, source in OWN.items():
        files.append(File.generated(config, f"reference/{name}.md", content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn a link to a file outside docs/ into one to its page here, or into its path where it has none."""
    name = page.file.src_uri.removeprefix("reference/").removesuffix(".md")
    folder = ROOT if name in OWN else (ROOT / "docs" / page.file.src_uri).parent
    here = Path("docs") / page.file.src_uri

    def mend(found: re.Match[str]) -> str:
        text, link, anchor = found[1], found[2], found[3] or ""
        target = (folder / link).resolve()
        if not target.is_relative_to(ROOT) or (
            target.is_relative_to(ROOT / "docs") and folder != ROOT and target.is_file()
        ):
            return found[0]
        known = {ROOT / source: f"reference/{name}.md" for name, source in OWN.items()} | {
            ROOT / "README.md": "index.md"
        }
        if target in known:
            uri = known[target]
        elif target.is_relative_to(ROOT / "docs") and target.is_file():
            uri = target.relative_to(ROOT / "docs").as_posix()
        elif (here.parent.parent / "docs" / link).is_file() or not target.exists():
            return found[0]
        else:
            return f"{text} (`{target.relative_to(ROOT).as_posix()}`)"
        up = "../" * (len(Path(page.file.src_uri).parts) - 1)
        return f"[{text}]({up}{uri}{anchor})"

    return LINK.sub(mend, markdown)
