"""Typed look-ups in a config.json; every complaint is one line that names the file, the field and what it
must be.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jddtree import strict_json
from jddtree.errors import UserError

MOST_INTEGER = 2**31 - 1
LEAST_FLOAT, MOST_FLOAT = 1.2e-38, 3.4e38  # of float32, but for 0
SHOWN = 200  # characters of a value in a complaint
KIND_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", list: "a list"}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; a missing or broken file is a `UserError`."""
    try:
        value = strict_json.read(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); download the file again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not an object; download the file again")
    return value


class Fields:
    """One JSON object. null counts as absent. section: dotted path of the object in the file, for
    complaints.
    """

    def __init__(self, values: dict[str, Any], path: Path, section: str = ""):
        self.values = {name: value for name, value in values.items() if value is not None}
        self.path, self._start = path, f"{section}." if section else ""

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def label(self, name: str) -> str:
        """How complaints call a field: 'rope_scaling.factor'."""
        return f"{self._start}{name}"

    def shown(self, name: str) -> str:
        """The value of a field for complaints, cut where it is long."""
        text = repr(self.values[name])
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."

    def error(self, name: str, complaint: str) -> UserError:
        """A UserError about one field, with the value found."""
        found = f"is {self.shown(name)}" if name in self.values else "is missing"
        return UserError(f"{self.path}: field {self.label(name)!r} {found}, {complaint}")

    def section(self, name: str) -> "Fields":
        """A nested object; an empty one where it is absent."""
        value = self.values.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "but must be an object")
        return Fields(value, self.path, self.label(name))

    def get(self, name: str, kind: type, **default: Any) -> Any:
        """The value, of type int (as int32 holds), float (as float32 holds; an integer will do), bool, str or
        list; `default=` where absent.
        """
        if name not in self.values:
            if "default" in default:
                return default["default"]
            raise self.error(name, "but the model cannot be built without it")
        value: Any = self.values[name]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(name, f"but must be {KIND_NAMES[kind]}")
        if type(value) is int and abs(value) > MOST_INTEGER:
            raise self.error(name, f"but must be at most {MOST_INTEGER}")
        if type(value) is float and value != 0 and not LEAST_FLOAT < abs(value) < MOST_FLOAT:
            raise self.error(name, f"but must be 0 or from {LEAST_FLOAT} to {MOST_FLOAT}")
        return value

    def positive(self, name: str, kind: type = int, **default: Any) -> Any:
        """As `get`, and above 0."""
        value = self.get(name, kind, **default)
        if value is not None and value <= 0:
            raise self.error(name, "but must be above 0")
        return value

    def at_most(self, name: str, most: int) -> int:
        """As `positive`, and not above `most`."""
        value: int = self.positive(name)
        if value > most:
            raise self.error(name, f"but must be at most {most}")
        return value

    def require(self, name: str, wanted: Any, why: str, *, present: bool = False) -> None:
        """Refuse another value than the only one this project implements; `present`: and the absent field."""
        if name not in self.values and not present:
            return
        if type(found := self.values.get(name)) is bool or type(wanted) is bool:
            good = found is wanted
        else:
            good = found == wanted
        if not good:
            raise self.error(name, f"but {why} needs {wanted!r}")

    def reject(self, name: str, why: str) -> None:
        """Refuse a field that must be absent or null."""
        if name in self.values:
            raise self.error(name, why)

    def reject_others(self, known: Iterable[str], why: str) -> None:
        """Refuse fields that nothing here reads: they may change the result."""
        for name in sorted(set(self.values) - set(known)):
            raise self.error(name, why)


def agreed(name: str, *places: Fields) -> Fields:
    """The first object that has the field; a UserError when two of them give different values."""
    holders = [place for place in places if name in place]
    for other in holders[1:]:
        if other.values[name] != holders[0].values[name]:
            first = f"{holders[0].label(name)!r} is {holders[0].shown(name)}"
            raise other.error(name, f"but field {first}; keep the right one")
    return holders[0] if holders else places[0]


def check_dtype(fields: Fields, wanted: tuple[str, ...]) -> None:
    """Refuse a file that declares another type of the weights; both names of the field are in use."""
    for name in ("dtype", "torch_dtype"):
        if name in fields and fields.values[name] not in wanted:
            raise fields.error(name, f"but must be {' or '.join(map(repr, wanted))}")
