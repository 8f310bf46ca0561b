"""Symmetry-aware generative models as NumPyro programs: prototype x̂ → transformation η → observation x."""

__version__ = "0.1.0"
