"""Drop-in modules over the ops."""

from .inplace_abn import InPlaceABN

__all__ = ["InPlaceABN"]
