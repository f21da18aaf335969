"""Build hook: links that work wherever the README is shown.

In the repository, links are relative, so that they work in every clone, fork and branch. A package index needs absolute
ones. A build for upload therefore names the repository: `make dist REPOSITORY=https://…` sets USETTA_REPOSITORY, and
the hook makes links and project URLs from it. Without it (an installation from a clone) the README stays as it is.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


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
