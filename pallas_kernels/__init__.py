"""GPU kernels of JDDTree. One module per kernel states its contract and has a plain-JAX twin."""
