"""What is run: one file a result, and the command line."""

from sgm_ppl.experiments.config import Config, Evaluation
from sgm_ppl.experiments.runs import Run, load_config

__all__ = ["Config", "Evaluation", "Run", "load_config"]
