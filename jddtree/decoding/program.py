"""What is fixed when a round is compiled, and the models that it runs over their weights."""

from dataclasses import dataclass

from jddtree.config import DrafterConfig, TargetConfig
from jddtree.decoding.state import Capacity
from jddtree.decoding.tree import lattice
from jddtree.drafter_kinds import model_of
from jddtree.models.drafters.base import Proposer
from jddtree.models.observer import Observer
from jddtree.models.parameters import Tree
from jddtree.models.target import Target


@dataclass(frozen=True)
class Program:
    """Everything that is fixed when the round is compiled. kernels: implementation of the kernels, None for the best.
    axis: the mesh axis that the weights are split over, None on one device. observer: sees and may change which experts
    rows go to, for recorders and benchmarks.
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    capacity: Capacity
    kernels: str | None = None
    axis: str | None = None
    observer: Observer | None = None

    @property
    def block(self) -> int:
        """Most tokens that a round can emit: the depth of its drafts and one more."""
        return self.drafter.block_size if self.drafter else 1


class Models:
    """The two models of a program over their weights, and the lattice of its trees."""

    def __init__(self, program: Program, weights: Tree):
        self.program = program
        taps = program.drafter.target_layer_ids if program.drafter else ()
        parts = program.target, weights["target"], taps, program.kernels, program.axis
        self.target = Target(*parts, observer=program.observer)
        self.drafter: Proposer | None = None
        if program.drafter:
            self.drafter = model_of(program.drafter).over(weights.get("drafter", {}), self.target, program.kernels)
        capacity = program.capacity
        self.lattice = lattice(program.block - 1, capacity.rows - 1, capacity.candidates)
