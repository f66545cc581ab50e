"""What `gateway bench` shows: statistics, progress, tables and the HTML page."""
