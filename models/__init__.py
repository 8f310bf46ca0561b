"""NumPyro programs: model and guide side by side."""
