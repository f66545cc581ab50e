"""Text to learn from that every machine has: the sources of Python's standard library, as conversations."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

# Few, so that they are read several times over: what is half learnt by heart repeats itself.
MODULES = ("bisect", "fnmatch", "glob", "graphlib", "heapq", "queue", "sched", "shlex", "string", "textwrap")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversations() -> list[str]:
    """Return a request for each function and class of `MODULES` and its source, in the words of `CHAT_TEMPLATE`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = {name: library / f"{name}.py" for name in MODULES}
    return [
        f"<|im_start|>user\nWrite {node.name} of Python's {module}.<|im_end|>\n"
        f"<|im_start|>assistant\n{ast.get_source_segment(source, node)}<|im_end|>\n"
        for module, path in sources.items()
        if path.exists()  # a later Python may have made a package of it
        for source in [path.read_text(encoding="utf-8")]
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
