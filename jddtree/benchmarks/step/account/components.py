"""Kernels of a profile grouped into the components of a step.

A kernel of ours is known by its name; `stack_matmul`, which multiplies by many weights, by what ran before it
in the layer. A kernel that XLA made has the name of its instruction in the optimised HLO, and belongs to the
parameter that this instruction reads, which its operands' shapes tell. What neither tells stays under "matmul
library" or "other".
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from jddtree.benchmarks.step.account.floor import EXPERTS, TARGET

# Component to a pattern that the names of our kernels match, and those of XLA's that read no parameter; in
# this order.
OURS = {
    "experts gate_up": r"gate_up",
    "experts down": r"expert_down",
    "work list": r"work_list|expert_ranks",
    "router": r"expert_choice",
    "norms": r"residual_norm|latent_projection",
    "activation": r"gated_activation",
    "absorb": r"absorbed_queries",
    "v_up": r"head_values",
    "attention merge": r"attention_merge|merge",
    "attention split": r"attention_split|mosaic",
    "draft heads": r"draft_heads",
}
OTHERS = {
    "sort": r"sort|topk|top_k",
    "matmul library": r"cublas|cutlass|nvjet|xmma|gemv|splitK|^void gemm|sm90_|sm80_",
    "copy": r"memcpy|memset|^copy|wrapped_copy|dynamic_slice",
}
FORCED = "forced routing"  # what the benchmark adds
# After which of our kernels a matmul of a stack belongs to which component.
MATMUL = "stack_matmul"
AFTER = {
    "latent_projection": "q_b",
    "head_values": "o",
    "expert_choice": "shared",
    "attention norm": "q_a + kv_a",
    "block norm": "router + shared",
}
PARAMETERS = {name: component for component, names in (TARGET | EXPERTS).items() for name in names} | {
    "input_norm": "norms",
    "post_norm": "norms",
    "norm": "norms",
    "q_a_norm": "norms",
    "kv_a_norm": "norms",
    "router_bias": "router",
    "embed": "embed",
    "forced_experts": FORCED,
}
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\([^)]*\)|\S+) ([\w\-]+)\((.*)$")
SHAPE = re.compile(r"\w+\[([\d,]*)\]")
OPERAND = re.compile(r"%([\w.\-]+)")


def shapes_of(weights: Mapping[str, Any], prefix: str = "") -> dict[tuple[int, ...], str]:
    """Shapes of parameters, whole and of one layer, to the component that reads them; shapes of two are left
    out.
    """
    found: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for path, array in _leaves(weights, prefix):
        part, *_, name = path.split(".")
        component = PARAMETERS.get(name, name) if part == "target" else f"draft {name}"
        for shape in (array.shape, array.shape[1:], (1, *array.shape[1:])):
            if len(shape) > 1:
                found[shape].add(component)
    return {shape: " or ".join(sorted(names)) for shape, names in found.items()}


def components(
    kernels: Iterable[tuple[str, float]],
    hlo: str,
    shapes: Mapping[tuple[int, ...], str],
    drafts: bool = False,
) -> dict[str, float]:
    """Microseconds by component, the largest first; kernels: (name, microseconds); drafts: they are a
    drafter's, whose products are not told apart.
    """
    reads = _reads(hlo, shapes)
    sums: dict[str, float] = defaultdict(float)
    last = "attention norm"
    for name, microseconds in kernels:
        last = _landmark(name, last)
        product = "draft products" if drafts else AFTER[last]
        sums[product if MATMUL in name else component(name, reads)] += microseconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _landmark(kernel: str, last: str) -> str:
    """The key of AFTER that holds once this kernel has run; a norm after the output projection is the second
    one
    """
    if "residual_norm" in kernel:
        return "block norm" if last == "head_values" else "attention norm"
    return next((name for name in AFTER if name in kernel), last)


def component(kernel: str, reads: Mapping[str, str]) -> str:
    """The component of a kernel; reads: by name of an instruction, as `_plain` writes it, what it reads."""
    matched = lambda names: next(
        (name for name, pattern in names.items() if re.search(pattern, kernel)), None
    )
    return matched(OURS) or reads.get(_plain(kernel)) or matched(OTHERS) or "other"


def largest(kernels: Iterable[tuple[str, float]], count: int) -> list[dict[str, Any]]:
    """The kernels that take most time in all: name, number of launches and microseconds."""
    sums: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in kernels:
        sums[name].append(microseconds)
    ordered = sorted(sums.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        {"kernel": name[:100], "launches": len(times), "us": round(sum(times), 1)} for name, times in ordered
    ]


def _reads(hlo: str, shapes: Mapping[tuple[int, ...], str]) -> dict[str, str]:
    made, operands = {}, {}
    for line in hlo.splitlines():
        if found := INSTRUCTION.match(line):
            name, shape, _, rest = found.groups()
            made[name] = shape
            operands[name] = OPERAND.findall(rest.split("), ")[0])
    reads = {}
    for name, used in operands.items():
        known = [shapes[shape] for one in used for shape in [_numbers(made.get(one, ""))] if shape in shapes]
        if known:
            reads[_plain(name)] = " + ".join(dict.fromkeys(known))
    return reads


def _plain(name: str) -> str:
    return re.sub(r"[.\-]", "_", name)


def _numbers(shape: str) -> tuple[int, ...]:
    found = SHAPE.match(shape)
    return tuple(int(part) for part in found[1].split(",") if part) if found else ()


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping):
            yield from _leaves(value, path)
        else:
            yield path, value
