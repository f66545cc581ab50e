"""Prompts: pieces of Python's standard library that do not overlap, so that they share nothing in a prefix cache."""

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


def pieces() -> Iterator[tuple[str, int]]:
    """Yield prompts of about 100 to 250 tokens with output lengths, which vary so that requests do not stay in step.

    The modules take turns after each piece, so that consecutive pieces differ.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [library / f"{name}.py" for name in dict.fromkeys(MODULES)]
    texts = [path.read_text(encoding="utf-8") for path in files if path.exists()]
    starts = [0] * len(texts)
    count = 0
    while True:
        for index, text in enumerate(texts):
            length = CHARACTERS[count % len(CHARACTERS)]
            piece = text[starts[index] : starts[index] + length]
            starts[index] += length
            if len(piece) == length:
                yield piece, OUTPUT_TOKENS[count % len(OUTPUT_TOKENS)]
                count += 1
        if all(start >= len(text) for start, text in zip(starts, texts, strict=True)):
            return
