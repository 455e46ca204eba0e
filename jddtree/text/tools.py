"""Tool declarations as TypeScript, the form in which K2.6 was taught to read them.

Contract: `tools_to_typescript` is a pure function of the tools; the order of keys in the input does not
matter. A schema that the TypeScript form cannot express raises `NotExpressible`, upon which the published
tokenizer declares the tools as JSON instead. Source of the rules and of the worked example:
`tool_declaration_ts.py`, published beside K2.6's weights.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

INDENT = "  "
ROOT_NAME = "parameters"
DEFINITION_PREFIX = "#/$defs/"
UNION_TYPES: Mapping[str, str] = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
CONSTRAINTS: Mapping[str, tuple[str, ...]] = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
ENUM_VALUES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


class NotExpressible(ValueError):
    """A JSON schema has no TypeScript form."""


def sorted_by_key(value: Any) -> Any:
    """A copy of a JSON value in which every object's keys are in ascending order."""
    if isinstance(value, dict):
        return {key: sorted_by_key(value[key]) for key in sorted(value)}
    return [sorted_by_key(item) for item in value] if isinstance(value, list | tuple) else value


def tools_to_typescript(tools: Sequence[Mapping[str, Any]]) -> str:
    """Declaration text of all tools of type function, empty when there is none; other tools are skipped.

    Raises NotExpressible when a parameter schema has no TypeScript form.
    """
    functions = [tool["function"] for tool in sorted_by_key(list(tools)) if tool["type"] == "function"]
    if not functions:
        return ""
    try:
        declarations = "\n".join(_function(function) for function in functions)
    except (AttributeError, KeyError, TypeError) as error:
        # A schema whose parts have other types than JSON Schema gives them, such as properties in a list.
        raise NotExpressible(f"malformed schema: {error}") from error
    return f"# Tools\n\n## functions\nnamespace functions {{\n{declarations}\n}}\n"


def _function(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    definitions = {
        name: schema for found in _values_of("$defs", parameters) for name, schema in found.items()
    }
    refers_to_root = "#" in _values_of("$ref", parameters)
    _check_references(
        [*_values_of("$ref", parameters), *_values_of("$ref", list(definitions.values()))], definitions
    )
    lines = []
    if refers_to_root:
        lines.append(f"interface {ROOT_NAME} {_root_interface(parameters)}")
    for name, schema in definitions.items():
        lines += _comment(schema.get("description"), "")
        lines.append(f"interface {name} {_type(schema, '')}")
    lines += _comment(function.get("description"), "")
    argument = ROOT_NAME if refers_to_root else _object(parameters, "")
    lines.append(f"type {function['name']} = (_: {argument}) => any;")
    return "\n".join(lines)


def _values_of(key: str, schema: Any) -> list[Any]:
    """Every value of a key inside a schema, definitions left out."""
    if isinstance(schema, list):
        return [value for item in schema for value in _values_of(key, item)]
    if not isinstance(schema, dict):
        return []
    inner = [value for name, item in schema.items() if name != "$defs" for value in _values_of(key, item)]
    return [schema[key], *inner] if key in schema else inner


def _check_references(targets: list[Any], definitions: Mapping[str, Any]) -> None:
    for target in targets:
        name = target.removeprefix(DEFINITION_PREFIX)
        if target != "#" and (name == target or name not in definitions):
            raise NotExpressible(f"$ref {target!r}")


def _type(schema: Any, indent: str) -> str:
    """Type expression of a schema; `indent` is that of the line on which it stands."""
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if schema == {}:
        return "any"
    if "$ref" in schema:
        return ROOT_NAME if schema["$ref"] == "#" else schema["$ref"].removeprefix(DEFINITION_PREFIX)
    if "anyOf" in schema:
        return " | ".join(_type(option, indent) for option in schema["anyOf"])
    if "enum" in schema:
        return _enum(schema)
    return _named_type(schema, indent)


def _enum(schema: dict[str, Any]) -> str:
    kinds = schema.get("type", [])
    kinds = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "null"]
    if len(kinds) > 1:
        raise NotExpressible(f"enum of types {kinds!r}")
    expected = ENUM_VALUES.get(kinds[0], object) if kinds else object
    for value in schema["enum"]:
        if value is not None and not isinstance(value, expected):
            raise NotExpressible(f"enum value {value!r} of type {kinds[0]!r}")
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])


def _named_type(schema: dict[str, Any], indent: str) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(UNION_TYPES[option] for option in kind)
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return _array(schema.get("items") or {}, indent)
    if isinstance(kind, str):
        return "number" if kind == "integer" else kind
    raise NotExpressible(f"schema type {kind!r}")


def _object(schema: dict[str, Any], indent: str) -> str:
    """`{...}` with one member per property: required ones first, each group in alphabetical order."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    inner = indent + INDENT
    names = sorted(properties, key=lambda name: (name not in required, name))
    members = [_property(name, properties[name], name in required, inner) for name in names]
    extra = schema.get("additionalProperties")
    if extra is not None:
        members.append(f"{inner}[k: string]: {'never' if extra is False else _type(extra, inner)}")
    return _braces(members, indent)


def _root_interface(schema: dict[str, Any]) -> str:
    """Members of parameters that refer to themselves: in alphabetical order, required or not, and no
    others.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return _braces(
        [_property(name, properties[name], name in required, INDENT) for name in sorted(properties)], ""
    )


def _braces(members: list[str], indent: str) -> str:
    return "{\n" + ",\n".join(members) + f"\n{indent}}}" if members else "{}"


def _property(name: str, schema: Any, required: bool, indent: str) -> str:
    lines = list(_documentation(schema, indent))
    default = schema.get("default") if isinstance(schema, dict) else None
    if default is not None:
        shown = repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
        lines.append(f"{indent}// Default: {shown}")
    lines.append(f"{indent}{name}{'' if required else '?'}: {_type(schema, indent)}")
    return "\n".join(lines)


def _array(items: Any, indent: str) -> str:
    inner = indent + INDENT
    documentation = list(_documentation(items, inner))
    if not documentation:
        return f"Array<{_type(items, indent)}>"
    return "\n".join(["Array<", *documentation, f"{inner}{_type(items, inner)}", f"{indent}>"])


def _documentation(schema: Any, indent: str) -> Iterator[str]:
    """Comment lines of a schema: its description, then its constraints on one line."""
    if not isinstance(schema, dict):
        return
    yield from _comment(schema.get("description"), indent)
    plain = not {"$ref", "anyOf", "enum"} & schema.keys() and isinstance(schema.get("type"), str)
    names = CONSTRAINTS.get(schema["type"], ()) if plain else ()
    constraints = ", ".join(f"{name}: {schema[name]}" for name in names if name in schema)
    if constraints:
        yield f"{indent}// {constraints}"


def _comment(text: str | None, indent: str) -> Iterator[str]:
    for line in text.split("\n") if text else ():
        yield f"{indent}// {line}" if line else ""
