"""Print the lowest versions that pyproject.toml allows, as constraints for pip (`make test-lowest`).

torch is left out: constraints.txt says which one the tests use, and others take gigabytes to download. The packages
that only test, check or document are left out too.
"""

import re
import tomllib
from pathlib import Path

EXTRAS = ("hub", "parquet", "cluster", "serve")


def main() -> None:
    """Print one constraint a line."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]:
        floor = re.fullmatch(r"([\w-]+)>=([\w.]+)", requirement)
        if floor and floor[1] != "torch":
            print(f"{floor[1]}=={floor[2]}")


if __name__ == "__main__":
    main()
