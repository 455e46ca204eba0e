"""What the models are: frozen dataclasses read from a checkpoint's config.json, and whether two of them fit together.

Nothing falls back silently: a field without a value in the file either has no effect on the result or ends the load
with a `UserError` that names the field. Field names are the Hugging Face ones, so that a reader finds them in the file.
"""

from jddtree.config.architecture import TargetConfig, target_config
from jddtree.config.drafting import DrafterConfig, drafter_config
from jddtree.config.fields import read_json
from jddtree.config.quantisation import GROUP_SIZE
from jddtree.config.rotation import Rope
from jddtree.errors import UserError

__all__ = [
    "GROUP_SIZE",
    "DrafterConfig",
    "Rope",
    "TargetConfig",
    "check_pair",
    "drafter_config",
    "read_json",
    "target_config",
]


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Raise UserError when the drafter was made for another target."""
    for name, ours, theirs in (
        ("num_target_layers", drafter.num_target_layers, target.num_hidden_layers),
        ("hidden_size", drafter.hidden_size, target.hidden_size),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise UserError(
                f"the drafter is for another target: its {name} is {ours}, the target has {theirs}; "
                "give the drafter that was trained with this target"
            )
