"""Write Grafana's dashboards, `dashboards/*.json`: `python deploy/grafana/build.py`; `--check` only compares them."""

from __future__ import annotations

import sys
from pathlib import Path

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from panels import DASHBOARDS, GATEWAY, MODEL, Panel

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT = 24, 8


def chart(panel: Panel) -> timeseries.Panel:
    """Return Grafana's form of a chart."""
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.text)
        .datasource(SOURCE)
        .unit(panel.unit)
        .min(0)
        .height(HEIGHT)
        .span(WIDTH // 2)
        .line_width(2)
        .fill_opacity(20 if panel.is_stacked else 0)
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            common_builders.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        )
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    if panel.is_stacked:
        made.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    for letter, (expression, legend) in zip("ABCDEF", panel.queries, strict=False):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(letter).datasource(SOURCE).range()
        made.with_target(query)
    return made


def choice(name: str, query: str) -> dashboard.QueryVariable:
    """Return a variable of label values, several of which may be chosen."""
    return (
        dashboard.QueryVariable(name)
        .query(query)
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def document(name: str) -> str:
    """Return the JSON of a dashboard."""
    title, panels = DASHBOARDS[name]
    made = (
        dashboard.Dashboard(title)
        .uid(f"gateway-{name}")
        .tags(["speculation-gateway"])
        .editable()
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus").label("Prometheus"))
        .with_variable(choice("job", "label_values(gateway_backend_up, job)"))
        .with_variable(choice("instance", 'label_values(gateway_backend_up{job=~"$job"}, instance)').label("gateway"))
        .with_variable(choice("model", f"label_values(gateway_backend_up{{{GATEWAY}}}, model)"))
        .with_variable(choice("backend", f"label_values(gateway_backend_up{{{MODEL}}}, backend)").label("replica"))
        .link(
            dashboard.DashboardLink("Gateway")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["speculation-gateway"])
            .include_vars(True)
            .keep_time(True)
        )
    )
    for panel in panels:
        made.with_panel(chart(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def main() -> int:
    """Write all dashboards, or compare them; return 1 if they differ."""
    made = {f"{name}.json": document(name) for name in DASHBOARDS}
    if "--check" in sys.argv[1:]:
        return int({path.name: path.read_text() for path in FOLDER.iterdir()} != made)
    for name, text in made.items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
