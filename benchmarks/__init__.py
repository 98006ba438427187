"""One script a question; each prints a table of ratios, measured side by side."""
