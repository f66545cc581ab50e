"""`gateway policy`: rules and pins of a running gateway, through its `/admin` endpoints."""

from __future__ import annotations

from datetime import UTC, datetime
from difflib import unified_diff
from typing import Annotated, Any

import typer

from gateway.cli.admin import DEFAULT_URL, Admin, AdminKey, Url, failure
from gateway.cli.output import AsJson, say, say_json

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Distil and pin the rules of a running gateway. Exits 1 if the gateway refuses.",
)

Model = Annotated[str | None, typer.Option(help="The model.  [default: the only one with a learned policy]")]


@app.command()
def show(
    version: Annotated[int | None, typer.Argument(help="Print this version of the rules.")] = None,
    *,
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = "",
    model: Model = None,
) -> None:
    """Show what decides, the versions of the rules and the pin.

    With a version, print its rules.

    \b
    gateway policy show
    gateway policy show 3 > rules.yaml
    """
    if version is not None:
        rules = Admin(url, admin_key, model).get("/admin/policy/rules", version=version)
        if json:
            say_json(rules)
        else:
            say(rules["text"], nl=False)
        return
    models = _described(url, admin_key, model)
    if json:
        say_json({"models": models})
        return
    for name, description in models.items():
        say("\n".join(_lines(name, description)))


@app.command("list")
def list_versions(*, url: Url = DEFAULT_URL, admin_key: AdminKey = "", model: Model = None) -> None:
    """List the versions of the rules, and which is pinned.

    \b
    gateway policy list
    """
    for name, description in _described(url, admin_key, model).items():
        for line in _versions(description) or ["no rules yet: create them with `gateway policy distill`"]:
            say(f"{name}: {line}")


@app.command()
def diff(
    before: Annotated[int, typer.Argument(help="A version of the rules.")],
    after: Annotated[int, typer.Argument(help="Another one.")],
    *,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = "",
    model: Model = None,
) -> None:
    """Show in which lines two versions of the rules differ.

    \b
    gateway policy diff 2 3
    """
    admin = Admin(url, admin_key, model)
    texts = [admin.get("/admin/policy/rules", version=each)["text"].splitlines() for each in (before, after)]
    lines = unified_diff(texts[0], texts[1], f"version {before}", f"version {after}", lineterm="")
    say("\n".join(lines) or "They are the same.")


@app.command()
def distill(*, url: Url = DEFAULT_URL, admin_key: AdminKey = "", model: Model = None) -> None:
    """Distil rules from the learned policy, store and print them.

    They are the next version, and decide once pinned.

    \b
    gateway policy distill
    """
    rules = Admin(url, admin_key, model).post("/admin/policy/distill")
    say(rules["text"], nl=False)
    say(f"Stored as version {rules['version']}; activate it with `gateway policy pin {rules['version']}`.", err=True)


@app.command()
def pin(
    version: Annotated[int, typer.Argument(help="Version of the rules.")],
    *,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = "",
    model: Model = None,
) -> None:
    """Route by a version of the rules, until the pin is changed.

    This applies to all gateways of the pool.

    \b
    gateway policy pin 3
    """
    _print_pin(Admin(url, admin_key, model).post("/admin/policy/pin", version=version))


@app.command()
def unpin(*, url: Url = DEFAULT_URL, admin_key: AdminKey = "", model: Model = None) -> None:
    """Route by the learned policy again.

    \b
    gateway policy unpin
    """
    _print_pin(Admin(url, admin_key, model).post("/admin/policy/unpin"))


@app.command()
def rollback(*, url: Url = DEFAULT_URL, admin_key: AdminKey = "", model: Model = None) -> None:
    """Route by what decided before the last pin or unpin.

    A second rollback undoes the first.

    \b
    gateway policy rollback
    """
    _print_pin(Admin(url, admin_key, model).post("/admin/policy/rollback"))


@app.command()
def thaw(*, url: Url = DEFAULT_URL, admin_key: AdminKey = "", model: Model = None) -> None:
    """Resume a policy that its guardrail has frozen.

    The comparison starts over.

    \b
    gateway policy thaw
    """
    answer = Admin(url, admin_key, model).post("/admin/policy/thaw")
    say(f"{answer['model']}: thawed at {answer['thawed']}")


def _described(url: str, admin_key: str, model: str | None) -> dict[str, Any]:
    """Return what decides for each model, or only for the named one."""
    models = Admin(url, admin_key).get("/admin/policy")["models"]
    if model is not None and model not in models:
        raise failure(f"There is no model {model}; there are: {', '.join(models)}.")
    return {name: each for name, each in models.items() if model in (None, name)}


def _print_pin(answer: dict[str, Any]) -> None:
    say(f"{answer['model']}: {answer['decides']} decides; the other gateways of the pool follow within two seconds")


def _lines(name: str, description: dict[str, Any]) -> list[str]:
    if "decides" not in description:
        return [f"{name}: {description['policy']}, which does not learn"]
    lines = [f"{name}: {description['decides']} decides"]
    ratio = description["ratio_to_least_loaded"]
    if ratio is not None:
        low, high = description["ratio_interval"]
        lines.append(f"  takes {ratio:.2f} times as long as least_loaded (95% interval {low:.2f} to {high:.2f})")
    if description["frozen"]:
        lines.append("  FROZEN: was slower than least_loaded, which decides for now")
    lines += [f"  {backend} is an outlier: {reason}" for backend, reason in description["ejected"].items()]
    lines += [f"  {kind}" for kind in description.get("kinds", ())]
    if not description["versions"]:
        lines.append("  no rules yet: create them with `gateway policy distill`")
    return lines + [f"  {line}" for line in _versions(description)]


def _versions(description: dict[str, Any]) -> list[str]:
    return [
        f"version {each['version']} of {datetime.fromtimestamp(each['written_s'], UTC):%Y-%m-%d %H:%M:%S UTC}"
        + (", pinned" if each["version"] == description["pinned"] else "")
        for each in description.get("versions", ())
    ]
