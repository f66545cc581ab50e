"""`gateway picker`: the policies for a proxy that asks where each request goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gateway.cli.extras import require
from gateway.cli.serve import serve_pool

if TYPE_CHECKING:
    from gateway.config.settings import PoolSettings


def picker(
    context: typer.Context,
    *,
    config: Annotated[Path | None, typer.Option(help="The pool file.  [default: config/pool.yaml]")] = None,
    listen: Annotated[str | None, typer.Option(help="Host and port for gRPC; overrides the file.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the gateway itself; overrides the file.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Its port; 0 picks a free one.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of worker processes; overrides the file.")] = None,
) -> None:
    """Serve a pool as an endpoint picker of a proxy such as Envoy.

    It tells the proxy over gRPC which replica each request goes to.

    \b
    gateway picker --config pool.yaml --listen 0.0.0.0:9002
    """
    from gateway.config.settings.keys import checked_address
    from gateway.rooms.picker.settings import PickerSettings

    try:
        overrides = {} if listen is None else {"listen": checked_address(listen)}
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--listen") from None

    def section(settings: PoolSettings) -> dict[str, Any]:
        return {"picker": (PickerSettings.of(settings) or PickerSettings()).model_copy(update=overrides)}

    require("picker", "grpc_health", "google.protobuf")
    serve_pool(config or context.obj, {"host": host, "port": port, "workers": workers}, section)


COMMANDS: Final = {"picker": picker}
