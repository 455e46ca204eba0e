"""The house: imports point down, folders are small, names are told apart, and no way down is long."""

import statistics
from collections import Counter

import pytest
from structure import arrows, files_by_folder, folder, imports, lines, longest_chain, modules

# Who may import what, from the command line down to the kernels; a folder's own parts may import each other.
FLOORS = [
    ["jddtree.cli"],
    ["jddtree.benchmarks"],
    ["jddtree.evaluation"],
    ["jddtree.api", "jddtree.inputs", "jddtree.stats"],
    ["jddtree.serving"],
    ["jddtree.prompts"],
    ["jddtree.loading"],
    ["converters"],
    ["jddtree.decoding"],
    ["jddtree.models"],
    [
        "jddtree.config",
        "jddtree.parallel",
        "jddtree.text",
        "jddtree.results",
        "jddtree.command",
        "pallas_kernels",
    ],
    [
        "jddtree.drafter_kinds",
        "jddtree.limits",
        "jddtree.strict_json",
        "jddtree.streams",
        "jddtree.user_files",
    ],
    ["jddtree.errors", "jddtree.version"],
]
LEAVES = ("jddtree.text", "jddtree.config", "jddtree.parallel", "jddtree.results", "pallas_kernels")
DOOR = "jddtree"  # the public names, imported when first used; anything may be behind it


def floor(name: str) -> int:
    """The floor that a module stands on, 0 the top one."""
    for height, rooms in enumerate(FLOORS):
        if any(name == room or name.startswith(f"{room}.") for room in rooms):
            return height
    raise AssertionError(f"{name} stands on no floor; add it to FLOORS")


def room(name: str) -> str:
    """The entry of FLOORS that a module belongs to."""
    return next(one for one in FLOORS[floor(name)] if name == one or name.startswith(f"{one}."))


@pytest.mark.parametrize("name", [name for name in modules() if name != DOOR])
def test_imports_point_down(name):
    up = [target for target in imports()[name] if target != DOOR and floor(target) < floor(name)]
    beside = [
        target
        for target in imports()[name]
        if target != DOOR
        and floor(target) == floor(name)
        and room(target) != room(name)
        and room(name) in LEAVES
    ]
    assert not up and not beside, (name, up, beside)
    assert DOOR not in imports()[name], "a module imports what it needs from where it is"


def test_no_pair_of_folders_imports_each_other():
    """Modules at the top of `jddtree` are rooms of their own: a leaf and a door stand beside each other
    there.
    """
    pairs = {pair: found for pair, found in arrows().items() if "jddtree" not in pair}
    assert not [(pair, pairs[pair], pairs[pair[::-1]]) for pair in pairs if pair[::-1] in pairs]


def test_the_way_down_is_short():
    chain = longest_chain()
    assert len(chain) <= 16, " > ".join(chain)
    assert statistics.median(len(targets) for targets in imports().values()) <= 3


def test_folders_and_files_are_small():
    assert not {name: len(files) for name, files in files_by_folder().items() if len(files) > 14}
    assert not {name: lines(name) for name in modules() if lines(name) > 300}
    assert lines("jddtree.cli.main") <= 100


def test_names_tell_modules_apart():
    """No file repeats its folder's name, none of the package's own modules shares a name, and a prefix that
    three files of a folder share would be a folder.
    """
    plain = [
        name.rsplit(".", 1)[1]
        for name, path in modules().items()
        if "." in name and path.name != "__init__.py"
    ]
    ours = [
        name.rsplit(".", 1)[1]
        for name, path in modules().items()
        if name.startswith("jddtree.") and path.name not in ("__init__.py", "__main__.py")
    ]
    assert plain and not [word for word, count in Counter(ours).items() if count > 1]
    for place, files in files_by_folder().items():
        words = [name.rsplit(".", 1)[1] for name in files]
        parent = place.rsplit(".", 1)[-1]
        assert not [word for word in words if word in (parent, parent.rstrip("s"))], place
        assert not [
            prefix for prefix, count in Counter(w.split("_")[0] for w in words).items() if count > 2
        ], place


def test_every_folder_is_drawn_in_the_readme():
    """The layout of README.md names every folder that holds modules."""
    from structure import ROOT

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tops = {folder(name).split(".")[1] for name in modules() if folder(name).startswith("jddtree.")}
    assert not [top for top in tops if f"{top}/" not in text]
