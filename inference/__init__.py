"""What is done to models: objectives, training, importance weighting."""

from sgm_ppl.inference.checkpoints import load_params, save_params
from sgm_ppl.inference.compilation import enable_compilation_cache
from sgm_ppl.inference.estimates import (
    Comparison,
    Curve,
    Estimate,
    PerImage,
    UntrustedWeights,
    compare,
    from_inference_data,
    to_inference_data,
)
from sgm_ppl.inference.fit import FitResult, TrainingDiverged, fit
from sgm_ppl.inference.importance import iwlb, log_weights, proposals, reconstruction_error
from sgm_ppl.inference.log import read_log
from sgm_ppl.inference.optim import adamw, warmup_cosine

__all__ = [
    "Comparison",
    "Curve",
    "Estimate",
    "FitResult",
    "PerImage",
    "TrainingDiverged",
    "UntrustedWeights",
    "adamw",
    "compare",
    "enable_compilation_cache",
    "fit",
    "from_inference_data",
    "iwlb",
    "load_params",
    "log_weights",
    "proposals",
    "read_log",
    "reconstruction_error",
    "save_params",
    "to_inference_data",
    "warmup_cosine",
]
