"""Makes the CRDs from the pydantic models: ``python -m moontide.crdgen [--check]``, from the root of the repository.

Writes ``crds/*.yaml`` and the Helm chart's copies, which carry Helm's "keep" annotation as well: uninstalling the
operator must not delete every pool and fleet. With ``--check`` nothing is written, and drift ends with status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from moontide.api.v1alpha1 import GROUP, VERSION, Api
from moontide.kube.kinds import KINDS, Column, Kind

CRD_FOLDER = Path("crds")
CHART_FOLDER = Path("charts/moontide/files/crds")
_HEADER = "# Made by `python -m moontide.crdgen` from operator/moontide/api; change the models, not this file.\n"
_KEEP = {"helm.sh/resource-policy": "keep"}


class _StructuralSchema(GenerateJsonSchema):
    """JSON schema in the dialect of the API server: no null, no const, boolean exclusive bounds."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        # Absence stands for None: clients leave fields out, and `nullable` would let an explicit null through.
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        made = super().default_schema(schema)
        if made.get("default", ...) is None:
            del made["default"]
        factory = schema.get("default_factory")
        if factory is not None:
            # The API server fills the defaults of an object's fields only when the object is there, and checks an
            # object's default against its rules before that: so the default is written out in full.
            value = cast("Callable[[], Any]", factory)()
            made = {**made, "default": value.to_wire() if isinstance(value, Api) else value}
        return made

    def int_schema(self, schema: core_schema.IntSchema) -> JsonSchemaValue:
        return _boolean_bounds(super().int_schema(schema))

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return _boolean_bounds(super().float_schema(schema))


def _boolean_bounds(schema: JsonSchemaValue) -> JsonSchemaValue:
    for bound in ("minimum", "maximum"):
        exclusive = f"exclusive{bound.capitalize()}"
        if exclusive in schema:
            schema[bound], schema[exclusive] = schema[exclusive], True
    return schema


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """``node`` without references, titles and the keys that a structural schema may not have."""
    if isinstance(node, list):
        return [_inline(each, definitions) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        beside = {key: value for key, value in node.items() if key != "$ref"}
        node = {**definitions[node["$ref"].removeprefix("#/$defs/")], **beside}
    made: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            made[key] = {name: _inline(each, definitions) for name, each in value.items()}
        elif key == "const":
            made["enum"] = [value]
        elif key == "description":
            made[key] = " ".join(value.replace("``", "`").split())
        elif key in ("default", "enum", "x-kubernetes-validations"):
            made[key] = value
        elif key == "$defs" or (key == "title" and isinstance(value, str)):
            continue
        elif key == "additionalProperties" and value is False:
            # Pruning and strict field validation do this; the keyword is not allowed beside `properties`.
            continue
        else:
            made[key] = _inline(value, definitions)
    return made


def _without_defaults(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_defaults(each) for each in node]
    if not isinstance(node, dict):
        return node
    made = {}
    for key, value in node.items():
        if key == "properties":
            made[key] = {name: _without_defaults(each) for name, each in value.items()}
        elif key != "default":
            made[key] = _without_defaults(value)
    return made


def schema(model: type[Api]) -> dict[str, Any]:
    """The structural OpenAPI v3 schema of a kind. A status has no defaults: it says only what was observed."""
    raw = model.model_json_schema(by_alias=True, mode="validation", schema_generator=_StructuralSchema)
    made: dict[str, Any] = _inline(raw, raw.get("$defs", {}))
    made["properties"]["status"] = _without_defaults(made["properties"]["status"])
    return made


def _column(column: Column) -> dict[str, Any]:
    made: dict[str, Any] = {"name": column.name, "type": column.type, "jsonPath": column.path}
    if column.description:
        made["description"] = column.description
    return made


def crd(kind: Kind[Any], annotations: dict[str, str] | None = None) -> dict[str, Any]:
    """The CustomResourceDefinition of ``kind``."""
    subresources: dict[str, Any] = {"status": {}}
    if kind.scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    selectable = {"selectableFields": [{"jsonPath": path} for path in kind.selectable]} if kind.selectable else {}
    metadata: dict[str, Any] = {"name": f"{kind.plural}.{GROUP}"}
    if annotations:
        metadata["annotations"] = annotations
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": metadata,
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.singular,
                "shortNames": [kind.short],
                "categories": ["moontide"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema(kind.model)},
                    "subresources": subresources,
                    "additionalPrinterColumns": [_column(column) for column in kind.columns],
                    **selectable,
                }
            ],
        },
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def render() -> dict[Path, str]:
    """Every generated file, by its path from the root of the repository."""
    files = {}
    for kind in KINDS:
        for folder, notes in ((CRD_FOLDER, None), (CHART_FOLDER, _KEEP)):
            body = yaml.dump(crd(kind, notes), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
            files[folder / f"{kind.plural}.yaml"] = _HEADER + body
    return files


def drift(root: Path) -> list[Path]:
    """Generated files under ``root`` that are missing, differ, or no longer belong."""
    wanted = render()
    wrong = [path for path, text in wanted.items() if not (root / path).is_file() or (root / path).read_text() != text]
    for folder in (CRD_FOLDER, CHART_FOLDER):
        found = {each.relative_to(root) for each in (root / folder).glob("*.y*ml")}
        wrong += sorted(found - set(wanted))
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m moontide.crdgen", description="Make the CRDs from the models.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is out of date")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the repository (default: the current folder)")
    options = parser.parse_args(arguments)
    if not (options.root / "operator" / "moontide").is_dir():
        print(f"{options.root} is not the root of the repository", file=sys.stderr)
        return 2
    if options.check:
        wrong = drift(options.root)
        for path in wrong:
            print(f"{path} is out of date: run python -m moontide.crdgen", file=sys.stderr)
        return 1 if wrong else 0
    for path, text in render().items():
        target = options.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
