"""Prompts: pieces of Python's standard library, no two of which overlap, so that no cache knows one from another."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "heapq", "textwrap", "shlex", "bisect", "string", "queue", "glob", "fnmatch", "sched", "graphlib", "argparse",
    "ast", "calendar", "cmd", "codecs", "configparser", "contextlib", "copy", "csv", "dataclasses", "datetime",
    "difflib", "dis", "doctest", "enum", "fileinput", "fractions", "ftplib", "functools", "gettext", "getopt",
    "gzip", "hashlib", "imaplib", "inspect", "ipaddress", "linecache", "locale", "lzma", "mailbox", "mimetypes",
    "ntpath", "numbers", "opcode", "operator", "optparse", "pathlib", "pdb", "pickle", "pickletools", "platform",
    "plistlib", "posixpath", "pprint", "profile", "pstats", "pyclbr", "random", "reprlib", "runpy", "sched",
    "selectors", "shelve", "shutil", "site", "smtplib", "socket", "socketserver", "ssl", "stat", "statistics",
    "subprocess", "symtable", "tarfile", "tempfile", "threading", "timeit", "token", "tokenize", "trace",
    "traceback", "turtle", "types", "typing", "uuid", "warnings", "wave", "weakref", "webbrowser", "zipfile",
)  # fmt: skip
CHARACTERS = (300, 450, 600, 750)
OUTPUT_TOKENS = (128, 96, 160)


def pieces(characters: int | None = None) -> Iterator[tuple[str, int]]:
    """Yield prompts and the lengths of their answers, which differ so that requests do not run in step.

    A module is gone through from its beginning and left for the next one after each piece, so that neighbours differ.

    Parameters
    ----------
    characters
        Of every prompt; None takes 300, 450, 600 and 750 in turn (some 100 to 250 tokens).
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [library / f"{name}.py" for name in dict.fromkeys(MODULES)]
    texts = [path.read_text(encoding="utf-8") for path in files if path.exists()]
    starts = [0] * len(texts)
    count = 0
    while True:
        for place, text in enumerate(texts):
            length = characters or CHARACTERS[count % len(CHARACTERS)]
            piece = text[starts[place] : starts[place] + length]
            starts[place] += length
            if len(piece) == length:
                yield piece, OUTPUT_TOKENS[count % len(OUTPUT_TOKENS)]
                count += 1
        if all(start >= len(text) for start, text in zip(starts, texts, strict=True)):
            return
