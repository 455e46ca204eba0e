"""From Hugging Face checkpoint folders to the arrays of `jddtree.models.parameters`; NumPy only, nothing prints."""
