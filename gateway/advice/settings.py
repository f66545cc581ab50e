"""Evidence from the settings of a model: what each backend is, and the flags that it was started with."""

from __future__ import annotations

from backends.speculation import num_speculative_tokens, serve_config
from gateway.advice.evidence import BackendEvidence, ModelEvidence, Vocabularies
from gateway.advice.tokenizer import compare_vocabularies
from gateway.config.settings import ModelSettings
from gateway.config.settings.backend import BackendSettings


def evidence_of(name: str, settings: ModelSettings) -> ModelEvidence:
    """Return what the settings of a model tell; reads the tokenizers of models in local folders."""
    backends = tuple(_of_backend(each, backend) for each, backend in settings.backends.items())
    return ModelEvidence(name, backends)


def calibration_of(settings: ModelSettings, backend: str) -> str | None:
    """Return the calibration of a simulated backend."""
    member = settings.backends.get(backend)
    return member.simulate.calibration if member is not None and member.simulate is not None else None


def _of_backend(name: str, settings: BackendSettings) -> BackendEvidence:
    config = serve_config(settings.method, settings.speculative_config)
    k = num_speculative_tokens(settings.method, settings.speculative_config)
    return BackendEvidence(
        name,
        settings.method,
        k,
        flags=None if settings.serve is None else tuple(settings.serve.flags),
        speculative_config={key: value for key, value in config.items() if key != "method"},
        vocabularies=_vocabularies(settings),
    )


def _vocabularies(settings: BackendSettings) -> Vocabularies | None:
    config = settings.speculative_config
    if settings.serve is None or config is None or config.model is None:
        return None
    return compare_vocabularies(settings.serve.model, config.model)
