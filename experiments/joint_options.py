"""What every experiment with the joint model is told: its networks and its training.  Joint-2022 appendix A."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from sgm_ppl.experiments.config import Preset
from sgm_ppl.inference.joint import PAPER_JOINT, JointTraining

if TYPE_CHECKING:
    from sgm_ppl.models.joint import JointNets
    from sgm_ppl.transforms import Affine, Family

__all__ = ["JOINT_PRESETS", "JointOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointOptions:
    """Networks and training of the joint model; the defaults are the paper's.  Joint-2022 appendix A."""

    training: JointTraining = PAPER_JOINT
    """Steps, learning rates, β."""
    latent: int = 20
    """Dimensions of z."""
    filters: tuple[int, ...] = (64, 128, 256)
    """Of the encoder's convolutions, and in reverse of the decoder's; none are MLPs, which a CPU prefers."""
    hidden: tuple[int, ...] = (256,)
    """Hidden layers between convolutions and z."""
    posterior_features: tuple[int, ...] = ()
    """Hidden layers before the flow q(η | x); none in the paper."""
    averaged: int = 10
    """Copies of an image that the encoder is averaged over.  Eq. (19)"""
    pixel_scale: float = 0.5
    """σ at first."""
    interpolation: Literal["cubic", "linear"] = "cubic"
    """Between pixels, when an image is moved; linear is much faster where prototypes are learnt."""

    def transform(self, names: tuple[str, ...] = ("rotation",), eta_max: tuple[float, ...] = ()) -> Affine:
        """The family with these parameters."""
        from sgm_ppl.transforms import Affine

        return Affine(names, eta_max, interpolation=self.interpolation)

    def nets(self, image_shape: tuple[int, ...], transform: Family, **changes: Any) -> JointNets:
        """The networks for images [height, width, channel]."""
        from sgm_ppl.models.joint import JointNets

        height, width, channels = image_shape
        options = {
            name: getattr(self, name)
            for name in ("latent", "filters", "hidden", "posterior_features", "averaged", "pixel_scale")
        }
        return JointNets((height, width, channels), transform=transform, **(options | changes))


# With 1/5 of the steps β cannot begin at 10: z would be given up in the meantime, and not be found again.
JOINT_PRESETS: dict[Preset, JointOptions] = {
    "smoke": JointOptions(
        training=JointTraining(steps=5, batch_size=20, beta=(2.0, 1.0)),
        latent=4,
        filters=(),
        hidden=(16,),
        averaged=4,
        interpolation="linear",
    ),
    "laptop": JointOptions(
        training=JointTraining(steps=3_000, batch_size=64, learning_rate=3e-3, warmup=0.1, beta=(2.0, 1.0)),
        filters=(),
        hidden=(512, 256),
        posterior_features=(256,),
        pixel_scale=0.3,
        interpolation="linear",
    ),
    "paper": JointOptions(),
}
