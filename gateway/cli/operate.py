"""`gateway drain`, `resume` and `reload`: what an operator changes in a running gateway."""

from __future__ import annotations

import time
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from backends.health import SERVING
from gateway.cli.admin import DEFAULT_URL, Admin, AdminKey, Url, failure
from gateway.cli.output import AsJson, say, say_json

_POLL_S = 0.5

Replica = Annotated[str, typer.Argument(metavar="NAME", help="The replica: NAME, or MODEL/NAME.")]


def drain(
    name: Replica,
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Return once no request is in flight there.")] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = "",
) -> None:
    """Send no more requests to a replica; those in flight finish.

    \b
    gateway drain head
    gateway drain llama-3.1-8b/head --wait && systemctl restart vllm-head
    """
    admin = Admin(url, admin_key)
    model, backend, backends = _find(admin, name)
    answer = admin.post("/admin/drain", model=model, backend=backend)
    say(
        f"{model}/{backend} is {answer['state']}; {_in_flight(answer)} requests in flight there finish. "
        f"`gateway resume {name}` sends it requests again."
    )
    if not any(each["state"] in SERVING for other, each in backends.items() if other != backend):
        say(f"warning: no other replica of {model} is up: its requests are refused", err=True)
    while wait:
        time.sleep(_POLL_S)  # before it is asked: another worker may answer
        each = admin.get("/admin/pool")["models"].get(model, {"backends": {}})["backends"].get(backend)
        if each is not None and each["state"] != answer["state"]:
            raise failure(f"{model}/{backend} is {each['state']}: somebody resumed it")
        if each is None or not _in_flight(each):
            break


def _in_flight(backend: Mapping[str, Any]) -> int:
    """Return a replica's requests in flight, from all processes."""
    return int(backend["in_flight"] + backend["others"])


def resume(name: Replica, *, url: Url = DEFAULT_URL, admin_key: AdminKey = "") -> None:
    """Send requests to a drained replica again.

    \b
    gateway resume head
    """
    admin = Admin(url, admin_key)
    model, backend, _ = _find(admin, name)
    state = admin.post("/admin/resume", model=model, backend=backend)["state"]
    say(f"{model}/{backend} is {state}{'' if state == 'up' else ', until its engine has answered'}")


def reload(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check the file, and say what would change.")] = False,
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = "",
) -> None:
    """Reload the pool file; print what changed, or why it is refused.

    It is applied as a whole or not at all, and requests in flight are not disturbed. Exits 1 if it is refused.

    \b
    gateway reload --dry-run
    gateway reload
    """
    answer = Admin(url, admin_key).send("/admin/reload", dry_run=dry_run)
    changes = answer["changes"]
    if json:
        say_json(answer)
        return
    count = f"{len(changes)} change{'' if len(changes) == 1 else 's'}"
    say("\n".join([*changes, f"{count}{', not made' if dry_run and changes else ''}"]))


def _find(admin: Admin, name: str) -> tuple[str, str, dict[str, Any]]:
    """Return model and name of a replica, and the model's replicas; without one, exit 1 with the nearest name."""
    models = admin.get("/admin/pool")["models"]
    known = [(model, backend) for model, each in models.items() for backend in each["backends"]]
    found = [pair for pair in known if name in (pair[1], "/".join(pair))]
    if len(found) == 1:
        [(model, backend)] = found
        return model, backend, models[model]["backends"]
    names = ["/".join(pair) for pair in found or known]
    if found:
        raise failure(f"Several models have a replica {name}; name one of: {', '.join(names)}")
    near = get_close_matches(name, [*names, *(backend for _, backend in known)], 1, 0.5)
    did_you_mean = f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(names)}"
    raise failure(f"There is no replica {name}{did_you_mean}")
