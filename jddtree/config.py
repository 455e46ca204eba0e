"""What the models are: frozen dataclasses read from a checkpoint's config.json, and whether two of them fit together.

Nothing falls back silently: a field without a value in the file either has no effect on the result or ends the load
with a `UserError` that names the field. Field names are the Hugging Face ones, so that a reader finds them in the file.
"""

from jddtree.config_drafter import DFlashConfig, dflash_config
from jddtree.config_fields import read_json
from jddtree.config_rope import Rope
from jddtree.config_target import GROUP_SIZE, TargetConfig, target_config
from jddtree.drafter_kinds import DrafterConfig
from jddtree.errors import UserError

__all__ = [
    "GROUP_SIZE",
    "DFlashConfig",
    "DrafterConfig",
    "Rope",
    "TargetConfig",
    "check_pair",
    "dflash_config",
    "read_json",
    "target_config",
]


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Raise UserError when the drafter was made for another target."""
    for name, (field, ours) in drafter.of_target().items():
        if ours != (theirs := getattr(target, field)):
            raise UserError(
                f"the drafter is for another target: its {name} is {ours}, the target has {theirs}; "
                "give the drafter that was trained with this target"
            )
