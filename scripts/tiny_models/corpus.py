"""Training text that every machine has: the sources of Python's standard library, as conversations."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

# Few modules, so that each is seen several times: half-memorised text repeats itself.
MODULES = ("bisect", "fnmatch", "glob", "graphlib", "heapq", "queue", "sched", "shlex", "string", "textwrap")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversations() -> list[str]:
    """Return a request for each function and class of `MODULES` and its source, formatted as by `CHAT_TEMPLATE`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = {name: library / f"{name}.py" for name in MODULES}
    return [
        f"<|im_start|>user\nWrite {node.name} of Python's {module}.<|im_end|>\n"
        f"<|im_start|>assistant\n{ast.get_source_segment(source, node)}<|im_end|>\n"
        for module, path in sources.items()
        if path.exists()  # a package in later versions of Python
        for source in [path.read_text(encoding="utf-8")]
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
