"""Build hooks: links that work wherever the README is shown, and a software bill of materials in the wheel.

In the repository, links are relative, so that they work in every clone, fork and branch. A package index needs absolute
ones. A build for upload therefore names the repository: `make dist REPOSITORY=https://…` sets USETTA_REPOSITORY, and
the hook makes links and project URLs from it. Without it (an installation from a clone) the README stays as it is.

The bill of materials (CycloneDX, in `.dist-info/sboms`) lists what the wheel requires, and the parts of others that it
contains. Which versions an installation has is for `make audit` to find out.
"""

import json
import os
import re
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

CONTAINED = (
    ("OpenAI CLIP byte-pair merges", "MIT", "src/usetta/models/clip_merges.txt.gz"),
    ("text tower of the embedded model, with codes initialised from all-MiniLM-L6-v2", "MIT AND Apache-2.0", "text-*"),
    ("photographs of scikit-image", "CC0-1.0", "src/usetta/serve/page/examples"),
)
"""What NOTICE says is contained: name, licence, files."""


def absolute(text: str, repository: str) -> str:
    """Markdown whose relative links and images point to files of the repository."""
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?://|#)", rf"\g<1>{repository}/raw/HEAD/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?://|#)", rf"\g<1>{repository}/blob/HEAD/", text)


class ReadmeAndUrls(MetadataHookInterface):
    """Fills in `readme` and `urls` of the project's metadata."""

    def update(self, metadata: dict) -> None:
        """Called by hatchling with the fields of `[project]`."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("USETTA_REPOSITORY", "").rstrip("/")
        if repository:
            text = absolute(text, repository)
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": f"{repository}/blob/HEAD/docs/index.md",
                "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class BillOfMaterials(BuildHookInterface):
    """Writes `sbom.cdx.json`, which the wheel takes in, and removes it afterwards."""

    def initialize(self, version: str, build_data: dict) -> None:
        """Called by hatchling before it builds."""
        project = self.metadata.core
        groups = {"": project.dependencies, **project.optional_dependencies}
        required = [
            {
                "type": "library",
                "name": (name := re.match(r"[\w.-]+", requirement)[0]),
                "purl": f"pkg:pypi/{name.lower()}",
                "scope": "optional" if extra else "required",
                "properties": [{"name": "requirement", "value": requirement}, {"name": "extra", "value": extra}],
            }
            for extra, requirements in groups.items()
            if extra not in ("test", "lint", "docs")
            for requirement in requirements
            if not requirement.startswith("usetta")
        ]
        contained = [
            {
                "type": "data",
                "name": name,
                "licenses": [{"expression": licence}],
                "properties": [{"name": "files", "value": files}],
            }
            for name, licence, files in CONTAINED
        ]
        itself = {"type": "library", "name": project.name, "version": self.metadata.version, "purl": "pkg:pypi/usetta"}
        bill = {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": itself},
            "components": required + contained,
        }
        (Path(self.root) / "sbom.cdx.json").write_text(json.dumps(bill, indent=1), encoding="utf-8")

    def finalize(self, version: str, build_data: dict, artifact_path: str) -> None:
        """Called by hatchling when the package is built."""
        (Path(self.root) / "sbom.cdx.json").unlink(missing_ok=True)
