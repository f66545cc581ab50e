"""The dashboard: a page at `/dashboard`, and the live data that it shows, below `/admin/dashboard`."""
