"""FlashMLA's dense decoding kernel, as vLLM builds it: attention of one sequence, causal, without a tree
mask.
"""

from typing import Any, NamedTuple

import torch
from vllm.third_party.flashmla import flash_mla_interface

PAGE = 64  # keys
LATENT, WIDTH = 512, 576  # values, and values with the rotated key


class Cache(NamedTuple):
    """Latents bfloat16 [pages, 64, 1, 576] of one sequence, its pages int32 [1, pages], its length int32
    [1].
    """

    latents: torch.Tensor
    pages: torch.Tensor
    length: torch.Tensor


def random_cache(context: int) -> Cache:
    """A cache that holds `context` keys, a multiple of 64."""
    count = context // PAGE
    latents = torch.randn(count, PAGE, 1, WIDTH, dtype=torch.bfloat16, device="cuda")
    pages = torch.arange(count, dtype=torch.int32, device="cuda")[None]
    return Cache(latents, pages, torch.tensor([context], dtype=torch.int32, device="cuda"))


def schedule() -> Any:
    """What the first call of one shape and length fills in and all later ones take."""
    return flash_mla_interface.get_mla_metadata()[0]


def attention(queries: torch.Tensor, cache: Cache, planned: Any) -> torch.Tensor:
    """Latent results bfloat16 [1, rows, heads, 512] of absorbed queries [1, rows, heads, 576], which are the
    last keys of the cache.
    """
    results, _ = flash_mla_interface.flash_mla_with_kvcache(
        queries, cache.latents, cache.pages, cache.length, LATENT, planned, causal=True
    )
    return results
