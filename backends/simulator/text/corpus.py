"""The text that the simulated model imitates: documentation and source code that come with every Python.

The reference pages of `pydoc_data.topics` serve as prose, modules of the standard library as code. The project ships
and downloads no text of its own.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

_CODE_MODULES = (
    "argparse.py",
    "bisect.py",
    "calendar.py",
    "configparser.py",
    "csv.py",
    "dataclasses.py",
    "difflib.py",
    "enum.py",
    "fractions.py",
    "functools.py",
    "heapq.py",
    "queue.py",
    "shutil.py",
    "statistics.py",
    "string.py",
    "textwrap.py",
)


def prose() -> str:
    """Return the Python reference pages as one text, about 450,000 characters."""
    from pydoc_data.topics import topics

    return "\n\n".join(text for _, text in sorted(topics.items()))


def code() -> str:
    """Return the source of some modules of the standard library, about 600,000 characters.

    Modules that the installation lacks are left out; without any sources the text is empty.
    """
    library = Path(sysconfig.get_path("stdlib"))
    sources = (library / name for name in _CODE_MODULES)
    return "\n\n".join(source.read_text(encoding="utf-8") for source in sources if source.is_file())
