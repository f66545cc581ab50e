"""The service: an OpenAI-compatible endpoint for vLLM replicas that speculate differently."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("speculation-gateway")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0.0.0"
