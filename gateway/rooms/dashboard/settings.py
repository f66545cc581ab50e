"""The section `dashboard`."""

from __future__ import annotations

from gateway.config.settings.base import Section


class DashboardSettings(Section):
    """The page at `/dashboard`, and the data that it shows.

    Parameters
    ----------
    enabled
        Whether there is a dashboard.
    public
        Whether it shows its data without a key. It names models, backends, workloads and templates; changes always
        need a key with the scope `write`.
    """

    key = "dashboard"
    is_always = True

    enabled: bool = True
    public: bool = False
