"""The Python examples of the manual's pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ADDRESS = "http://127.0.0.1:8000"  # of the server in examples
BY_CLIENTS = {  # the package that an example of docs/recipes/frameworks.md imports first → the client of tests/clients
    "openai": "openai",
    "anthropic": "anthropic",
    "langchain_openai": "langchain",
    "llama_index": "llama_index",
    "pydantic_ai": "pydantic_ai",
    "instructor": "instructor",
    "litellm": "litellm",
}


def read_examples() -> Iterator[tuple[str, str]]:
    """Yield (page, code) of every Python block."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for code in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S):
            yield path.relative_to(ROOT).as_posix(), code


def find_client_example(client: str, url: str) -> str | None:
    """Return the code of a client's example, for the server at `url`; None if the page has none."""
    for page, code in read_examples():
        first = re.search(r"^(?:from|import) (\w+)", code, re.M)
        if page == "docs/recipes/frameworks.md" and first and BY_CLIENTS.get(first[1]) == client:
            return code.replace(ADDRESS, url)
    return None
