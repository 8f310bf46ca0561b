"""Families of transformations, each a group: call a family on η for an element, call an element on an image.

T(eta)(x) transforms, T(eta).inverse() undoes, T(a) @ T(b) is first b, then a, composed before anything is interpolated.
"""

from sgm_ppl.transforms.affine import GENERATORS, Affine, AffineElement
from sgm_ppl.transforms.base import Element, Family, passthrough_clip
from sgm_ppl.transforms.colour import Colour, ColourElement, hsv_to_rgb, rgb_to_hsv
from sgm_ppl.transforms.product import Product, ProductElement
from sgm_ppl.transforms.warp import Interpolation, sample_image

__all__ = [
    "GENERATORS",
    "Affine",
    "AffineElement",
    "Colour",
    "ColourElement",
    "Element",
    "Family",
    "Interpolation",
    "Product",
    "ProductElement",
    "hsv_to_rgb",
    "passthrough_clip",
    "rgb_to_hsv",
    "sample_image",
]
