"""What is run: one file a result, and the command line."""

from sgm_ppl.experiments.runs import Run, load_config

__all__ = ["Run", "load_config"]
