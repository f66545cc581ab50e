"""The Python parts of the installer of vLLM for the CPU; they need neither vLLM nor PyTorch."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PARTS = Path(__file__).parents[2] / "scripts" / "vllm_cpu"

BROKEN = """\
import torch


def before():
    return 1


def _expand_kernel_impl(
    output,
    input_val,
):
    torch.ops._C.expand_kernel_impl(
        output,
    )


def after():
    return 2
"""


def part(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PARTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    path = tmp_path / "vllm" / "utils" / "cpu_triton_utils.py"
    path.parent.mkdir(parents=True)
    path.write_text(BROKEN)
    return path


def test_only_the_broken_kernel_is_replaced_and_only_once(kernels: Path, tmp_path: Path) -> None:
    mend = part("mend")
    mend.expand_in_place(tmp_path)
    mended = kernels.read_text()
    assert "torch.ops._C" not in mended
    assert "def before():\n    return 1" in mended
    assert "def after():\n    return 2" in mended
    mend.expand_in_place(tmp_path)
    assert kernels.read_text() == mended


@pytest.mark.parametrize("other", ["", "def _expand_kernel_impl(output):\n    return output\n"])
def test_another_version_of_vllm_is_refused_and_left_unchanged(kernels: Path, tmp_path: Path, other: str) -> None:
    kernels.write_text(other)
    with pytest.raises(SystemExit, match=r"vllm-cpu 0\.32\.0"):
        part("mend").expand_in_place(tmp_path)
    assert kernels.read_text() == other


def test_requirements_leave_out_pytorch_extras_and_other_platforms() -> None:
    requirements = part("requirements").needed(
        [
            "numpy",
            "torch==2.13.0+cpu",
            "torchaudio",
            "mistral_common[image]>=1.11.6",
            "av; extra == 'audio'",
            'six>=1.16.0; python_version > "3"',
            'protobuf==7; platform_machine == "s390x"',
        ]
    )
    assert requirements == ["numpy", "mistral_common[image]>=1.11.6", "six>=1.16.0"]
