"""NumPyro programs: model and guide side by side."""

from sgm_ppl.models.inv_vae import inv_vae, inv_vae_guide
from sgm_ppl.models.vae import VAENets, vae, vae_guide, with_pixel_scale

__all__ = ["VAENets", "inv_vae", "inv_vae_guide", "vae", "vae_guide", "with_pixel_scale"]
