"""Drafters: what proposes the tokens of a round. `base` is all that decoding knows of them."""
