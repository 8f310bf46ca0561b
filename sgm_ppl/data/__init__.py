"""Real and rendered image sets, by name."""
