"""How Sphinx makes a site of the documentation: scripts/docs-site.

The pages are plain Markdown that reads as well on a forge. Sphinx's source folder is the root of the repository, so
links to files beside `docs` work in both places. The navigation is made from the links of the pages in `_CONTENTS`.
What readers search for beyond the words of headings stands below the heading that answers, as
`<!-- search: 429, rate limit -->`.
"""

import re

from sphinx.application import Sphinx

project = "Speculation gateway"
copyright = "the authors; Apache-2.0"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "deploy/**.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
nitpicky = True
suppress_warnings = ["toc.excluded"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["redirect"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"

_CONTENTS = ("docs/index", "docs/decisions/README", "docs/examples/README")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FILE_NAME = re.compile(r"\[[\w./-]+\.md\](?=\()")
_SEARCHED = re.compile(r"^<!-- search: (.*) -->$", re.MULTILINE)
_LINK = re.compile(r"^(?:- |\| )?\[([^\]]+)\]\(([^)#:]+)\.md\)", re.MULTILINE)


def _add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Add to a page of contents, section by section, the pages that it links at the beginning of a line."""
    if name not in _CONTENTS:
        return
    for section in re.split(r"^## ", _COMMENT.sub("", source[0]), flags=re.MULTILINE):
        pages = _LINK.findall(section)
        if pages:
            heading = section.partition("\n")[0]
            caption = f":caption: {heading}\n" if name == root_doc else ""
            entries = "\n".join(f"{title} <{page}>" if caption else page for title, page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n{caption}\n{entries}\n```\n"


def _adapt(app: Sphinx, name: str, source: list[str]) -> None:
    """Show titles of pages in links, add search terms that readers use, and leave README out of the navigation."""
    source[0] = _FILE_NAME.sub("[]", source[0])
    source[0] = _SEARCHED.sub(lambda found: f"```{{index}} ! {found[1].replace(', ', ', ! ')}\n```", source[0])
    if name == "README":  # the front page on a forge: here for its links, which are checked
        source[0] = f"---\norphan: true\nno-search: true\n---\n{source[0]}"
    elif name == "CHANGELOG" or name.startswith("docs/decisions/"):  # they tell of the past
        source[0] = f"---\nno-search: true\n---\n{source[0]}"


def setup(app: Sphinx) -> None:
    """Register what is not Sphinx's own."""
    app.connect("source-read", _add_contents)
    app.connect("source-read", _adapt)
