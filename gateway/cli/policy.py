"""`gateway policy`: rules from experience and pins of a gateway that runs, through its `/admin`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

_DEFAULT_URL = "http://127.0.0.1:8080"
_TIMEOUT_S = 60.0
_WHOLE = 1000

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Look at what was learned, make rules of it, and pin them, at a gateway that runs. Exits 1 if it says no.",
)

Url = Annotated[str, typer.Option(help="The gateway's address.", envvar="GATEWAY_URL")]
AdminKey = Annotated[
    str, typer.Option(help="admin.key of its pool file, or printed at start.", envvar="GATEWAY_ADMIN_KEY")
]
Model = Annotated[str | None, typer.Option(help="Whose rules.  [default: the only one that learns]")]


@dataclass(frozen=True, slots=True)
class _Admin:
    url: str
    key: str
    model: str | None

    def get(self, path: str, **query: object) -> Any:
        given = {name: value for name, value in {"model": self.model, **query}.items() if value is not None}
        return self._ask("GET", f"{path}?{urlencode(given)}" if given else path, None)

    def post(self, path: str, **fields: object) -> Any:
        return self._ask("POST", path, {"model": self.model, **fields})

    def _ask(self, method: str, path: str, json: object) -> Any:
        import httpx

        url = self.url.rstrip("/") + path
        headers = {"authorization": f"Bearer {self.key}"}
        try:
            response = httpx.request(method, url, json=json, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
            answer = response.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _refused(f"{self.url} cannot be reached: {error}") from None
        except ValueError:
            raise _refused(f"{url} answers {response.status_code}, and not as a gateway does") from None
        if response.status_code != httpx.codes.OK:
            told = answer.get("error", {}) if isinstance(answer, dict) else {}
            raise _refused(str(told.get("message") or f"{url} answers {response.status_code}"))
        return answer


@app.command()
def show(
    version: Annotated[int | None, typer.Argument(help="Show these rules, instead of what decides.")] = None,
    *,
    url: Url = _DEFAULT_URL,
    admin_key: AdminKey = "",
    model: Model = None,
) -> None:
    """Tell what decides, which versions of the rules there are, and which is pinned; or print one version."""
    admin = _Admin(url, admin_key, model)
    if version is not None:
        typer.echo(admin.get("/admin/policy/rules", version=version)["text"], nl=False)
        return
    models = _Admin(url, admin_key, None).get("/admin/policy")["models"]
    if model is not None and model not in models:
        raise _refused(f"There is no model {model}; there are: {', '.join(models)}.")
    for name, told in models.items():
        if model in (None, name):
            typer.echo("\n".join(_lines(name, told)))


@app.command()
def diff(
    old: Annotated[int | None, typer.Argument(help="[default: the pinned one, else the last but one]")] = None,
    new: Annotated[int | None, typer.Argument(help="[default: the latest]")] = None,
    *,
    url: Url = _DEFAULT_URL,
    admin_key: AdminKey = "",
    model: Model = None,
) -> None:
    """Print how two versions of the rules differ, line by line."""
    admin = _Admin(url, admin_key, model)
    latest = admin.get("/admin/policy/rules", version=new)
    if old is None:
        told = admin.get("/admin/policy")["models"][latest["model"]]
        earlier = [one["version"] for one in told["versions"] if one["version"] < latest["version"]]
        pinned = told["pinned"]
        if pinned not in (None, latest["version"]):
            old = pinned
        elif earlier:
            old = earlier[-1]
        else:
            raise _refused(f"Version {latest['version']} is the only one: there is nothing to compare it with.")
    before = admin.get("/admin/policy/rules", version=old)
    lines = difflib.unified_diff(
        before["text"].splitlines(),
        latest["text"].splitlines(),
        f"version {before['version']} of {_when(before['written_s'])}",
        f"version {latest['version']} of {_when(latest['written_s'])}",
        n=_WHOLE,  # rules are tried in order, so what stands before a change matters: all of it
        lineterm="",
    )
    typer.echo("\n".join(lines) or f"versions {old} and {latest['version']} are the same")


@app.command()
def distill(*, url: Url = _DEFAULT_URL, admin_key: AdminKey = "", model: Model = None) -> None:
    """Make rules of what was learned, keep them as the next version, and print them. They decide once pinned."""
    made = _Admin(url, admin_key, model).post("/admin/policy/distill")
    typer.echo(made["text"], nl=False)
    typer.echo(f"Version {made['version']}; `gateway policy pin {made['version']}` has it decide.", err=True)


@app.command()
def pin(
    version: Annotated[int, typer.Argument(help="Of the rules.")],
    *,
    url: Url = _DEFAULT_URL,
    admin_key: AdminKey = "",
    model: Model = None,
) -> None:
    """Have a version of the rules decide, at all gateways of the pool, until another is pinned or none."""
    _tell(_Admin(url, admin_key, model).post("/admin/policy/pin", version=version))


@app.command()
def unpin(*, url: Url = _DEFAULT_URL, admin_key: AdminKey = "", model: Model = None) -> None:
    """Let the learned policy decide again."""
    _tell(_Admin(url, admin_key, model).post("/admin/policy/unpin"))


@app.command()
def rollback(*, url: Url = _DEFAULT_URL, admin_key: AdminKey = "", model: Model = None) -> None:
    """Go back to what was pinned before."""
    _tell(_Admin(url, admin_key, model).post("/admin/policy/rollback"))


@app.command()
def thaw(*, url: Url = _DEFAULT_URL, admin_key: AdminKey = "", model: Model = None) -> None:
    """Let a policy go on that froze itself, and forget what was held against it."""
    told = _Admin(url, admin_key, model).post("/admin/policy/thaw")
    typer.echo(f"{told['model']}: thawed at {told['thawed']}")


def _tell(told: dict[str, Any]) -> None:
    typer.echo(f"{told['model']}: {told['decides']} decides; the other gateways of the pool follow within two seconds")


def _lines(name: str, told: dict[str, Any]) -> list[str]:
    if "decides" not in told:
        return [f"{name}: {told['policy']}, which does not learn"]
    lines = [f"{name}: {told['decides']} decides"]
    ratio = told["ratio_to_least_loaded"]
    if ratio is not None:
        lines.append(f"  takes {ratio:.2f} times what least_loaded takes, as compared on a random share")
    if told["frozen"]:
        lines.append("  FROZEN: was slower than least_loaded, which decides for now")
    lines += [f"  {backend} is ejected as an outlier: {reason}" for backend, reason in told["ejected"].items()]
    if not told["versions"]:
        lines.append("  no rules yet: `gateway policy distill` makes them")
    for one in told["versions"]:
        pinned = ", pinned" if one["version"] == told["pinned"] else ""
        lines.append(f"  version {one['version']} of {_when(one['written_s'])}{pinned}")
    return lines


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _refused(message: str) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(1)
