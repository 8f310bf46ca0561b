"""The optimiser of every experiment: AdamW under a linear warm-up and a cosine decay (SGM appendix C)."""

from dataclasses import dataclass

import optax

__all__ = ["Schedule", "adamw", "warmup_cosine"]


def warmup_cosine(
    learning_rate: float, *, steps: int, initial: float = 1.0, final: float = 1.0, warmup: float = 0.0
) -> optax.Schedule:
    """lr(s) / lr = initial + (1 − initial) s/w up to w, then final + (1 − final)(1 + cos π(s − w)/(S − w))/2.  SGM C.

    S is `steps` and w = `warmup` · S; `initial`, `final` and `warmup` are the multipliers and the share that SGM gives.
    The defaults leave the learning rate constant.
    """
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1; got {steps}.")
    if not learning_rate > 0:
        raise ValueError(f"`learning_rate` must be positive; got {learning_rate}.")
    for name, multiplier in (("initial", initial), ("final", final)):
        if not multiplier >= 0:
            raise ValueError(f"`{name}` multiplies the learning rate and must not be negative; got {multiplier}.")
    if not 0 <= warmup < 1:
        raise ValueError(f"`warmup` is the share of the steps that warm up and must lie in [0, 1); got {warmup}.")
    warmup_steps = min(round(warmup * steps), steps - 1)
    decay = optax.cosine_decay_schedule(learning_rate, steps - warmup_steps, alpha=final)
    if warmup_steps == 0:
        return decay
    rise = optax.linear_schedule(initial * learning_rate, learning_rate, warmup_steps)
    return optax.join_schedules([rise, decay], [warmup_steps])


def adamw(
    learning_rate: float,
    *,
    steps: int,
    initial: float = 1.0,
    final: float = 1.0,
    warmup: float = 0.0,
    clip: float | None = None,
    weight_decay: float = 1e-4,
) -> optax.GradientTransformation:
    """θ ← θ − lr(s) [m̂ / (√v̂ + ε) + `weight_decay` θ], gradients scaled to a global norm of at most `clip`.  SGM C.

    The schedule lr(s) is `warmup_cosine`. With `weight_decay=0` this is plain Adam, as EquiVAE appendix B has it;
    Joint-2022 appendix A is `adamw(1e-3, steps=15_000, initial=0.1, final=0.1, warmup=500 / 15_000)`.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"`clip` is the largest global gradient norm and must be positive, or None; got {clip}.")
    if not weight_decay >= 0:
        raise ValueError(f"`weight_decay` must not be negative; got {weight_decay}.")
    schedule = warmup_cosine(learning_rate, steps=steps, initial=initial, final=final, warmup=warmup)
    optimiser = optax.adamw(schedule, weight_decay=weight_decay)
    return optimiser if clip is None else optax.chain(optax.clip_by_global_norm(clip), optimiser)


@dataclass(frozen=True)
class Schedule:
    """AdamW under linear warm-up and cosine decay, with the gradient's norm clipped.  SGM C."""

    steps: int
    learning_rate: float
    batch_size: int = 512
    initial: float = 0.01
    final: float = 0.001
    warmup: float = 0.2
    clip: float | None = 10.0
    weight_decay: float = 1e-4

    def optimiser(self) -> optax.GradientTransformation:
        return adamw(
            self.learning_rate,
            steps=self.steps,
            initial=self.initial,
            final=self.final,
            warmup=self.warmup,
            clip=self.clip,
            weight_decay=self.weight_decay,
        )
