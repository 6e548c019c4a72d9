"""What the tests of this folder may ask for."""

from lab_support.data import npz

__all__ = ["npz"]
