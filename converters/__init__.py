"""From Hugging Face checkpoint folders to the arrays of `jddtree.models.parameters`, and to stores of them.

NumPy only, except `placement`, which puts arrays on devices with JAX. Nothing prints.
"""
