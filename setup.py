"""Build what pyproject.toml cannot say: the starter below ddp_hydra/, and a readme whose links work elsewhere."""

import os
import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

STARTER = ("conf", "data", "models")
"""The folders of this checkout that are installed as ddp_hydra/starter, so that there is one source of them."""
REPOSITORY = os.environ.get("REPOSITORY", "").rstrip("/")
"""Address of the public repository: `make dist REPOSITORY=https://…`. Without it, links of the readme stay relative."""


def readme() -> str:
    """Return the readme; its relative links and images lead to the repository."""
    text = Path("README.md").read_text(encoding="utf-8")
    if not REPOSITORY:
        return text
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({REPOSITORY}/raw/HEAD/\1)", text)


setup(
    include_package_data=False,  # what goes in is listed here, not in MANIFEST.in, which is for the sdist
    packages=[
        # With `hydra_plugins` itself: Hydra lists the packages in it, also where the install is editable.
        *find_namespace_packages(include=["ddp_hydra*", "hydra_plugins*"]),
        *(f"ddp_hydra.starter.{name}" for name in STARTER),
    ],
    package_dir={f"ddp_hydra.starter.{name}": name for name in STARTER},
    package_data={
        "ddp_hydra": ["py.typed", "__init__.pyi", "cli/template/**", "tensorboard/page/*"],
        **{f"ddp_hydra.starter.{name}": ["**/*.yaml", "**/*.py"] for name in STARTER},
    },
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls={"Source": REPOSITORY, "Changelog": f"{REPOSITORY}/blob/HEAD/CHANGELOG.md"} if REPOSITORY else {},
)
