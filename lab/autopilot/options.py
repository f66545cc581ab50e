"""Options of `gateway autopilot`, and what the pool file says of the replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backends.calibration.calibration import Calibration, calibration_names, load_calibration
from backends.speculation import serve_config
from backends.validation import UsageError
from gateway.config.settings import ModelSettings
from gateway.discovery.api_server import ApiServer
from gateway.discovery.source import SourceError
from lab.autopilot.deployment import Deployment
from lab.autopilot.gateway_admin import GatewayAdmin
from lab.autopilot.journal import Speculation
from lab.autopilot.restart import OfDeployment, OfGateway, Restart

_READY_S = 30.0


@dataclass(frozen=True, slots=True)
class AutopilotOptions:
    """Options of the command line; see `gateway autopilot --help`."""

    config: Path
    records: Path
    model: str | None = None
    calibration: str | None = None
    methods: tuple[str, ...] = ()
    window_s: float = 7200.0
    every_s: float | None = None
    margin: float = 0.03
    tolerance: float = 0.02
    restart_s: float = 180.0
    budget: int = 100
    jobs: int | None = None
    apply: bool = False
    gateway: str = "http://127.0.0.1:8080"
    admin: str | None = None
    admin_key: str = ""
    key: str | None = None
    floor: float = 0.5
    load: float = 0.8
    patience_s: float = 600.0
    deployments: Mapping[str, str] | None = None
    state: Path | None = None
    json_file: Path | None = None


def fleet_of(served: ModelSettings) -> dict[str, Speculation]:
    """Return what each replica of the pool file runs."""
    return {
        name: Speculation(
            method=one.method,
            config={
                key: value for key, value in serve_config(one.method, one.speculative_config).items() if key != "method"
            },
        )
        for name, one in served.backends.items()
    }


def restarts_of(
    served: ModelSettings, admin: GatewayAdmin, config: Path, deployments: Mapping[str, str]
) -> dict[str, Restart]:
    """Return how each replica is restarted, as far as it can be."""
    for name in deployments:
        if name not in served.backends or served.backends[name].url is None:
            raise UsageError(f"--deployment {name}=...: the pool file has no backend {name} with `url`")
    launched = {name: one.serve for name, one in served.backends.items() if one.serve is not None}
    of_gateway = OfGateway(admin, config, {name: one.startup_timeout_s + _READY_S for name, one in launched.items()})
    restarts: dict[str, Restart] = dict.fromkeys(launched, of_gateway)
    if deployments:
        try:
            api = ApiServer.of_cluster()
        except SourceError as error:
            raise UsageError(str(error)) from None
        known = {name: deployment_of(text, api) for name, text in deployments.items()}
        restarts |= dict.fromkeys(known, OfDeployment(admin, config, known))
    return restarts


def deployment_of(text: str, api: ApiServer) -> Deployment:
    """Return the Deployment of `[NAMESPACE/]NAME[:CONTAINER]`."""
    namespace, _, rest = text.rpartition("/")
    name, _, container = rest.partition(":")
    return Deployment(api, name, namespace or None, container or None)


def calibration_of(served: ModelSettings, name: str | None) -> Calibration:
    """Return the calibration of the target: the one named, or that of a simulated replica.

    Raises
    ------
    UsageError
        If there is neither.
    """
    simulated = [one.simulate.calibration for one in served.backends.values() if one.simulate]
    if name is None and not simulated:
        raise UsageError(f"--calibration: name the target model and GPU; there are {', '.join(calibration_names())}")
    return load_calibration(name or simulated[0])
