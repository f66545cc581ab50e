"""Write the reference pages of the documentation from the code: python -m scripts.reference [--check].

`--check` writes nothing, names the pages that are not up to date, and exits 1 if there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.reference.chart import values_schema
from scripts.reference.command_line import command_line_page
from scripts.reference.failures import failures_page
from scripts.reference.figures import filled, read_figures
from scripts.reference.metrics import metrics_page
from scripts.reference.pool_file import pool_file_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
VALUES = ROOT / "deploy/helm/speculation-gateway/values.schema.json"


def pages() -> dict[Path, str]:
    """Return the text that each page should have."""
    metrics = DOCS / "metrics.md"
    written = {path: path.read_text("utf-8") for path in (ROOT / "README.md", *DOCS.glob("*.md"))}
    reliability = DOCS / "reliability.md"
    written[reliability] = failures_page(written[reliability])
    return {
        VALUES: values_schema(VALUES.read_text("utf-8")),
        DOCS / "reference/pool-file.md": pool_file_page(),
        DOCS / "reference/command-line.md": command_line_page(),
        metrics: metrics_page(written[metrics]),
        reliability: written[reliability],
        **filled(written, read_figures(ROOT)),
    }


def main() -> int:
    """Write or check the pages."""
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text}
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path} is not what the code says: run scripts/docs", file=sys.stderr)
        return bool(stale)
    for path, text in stale.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
