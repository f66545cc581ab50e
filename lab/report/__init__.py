"""The style and charts of HTML reports."""
