"""Builds the package from settings.ini, the record of its metadata."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="], interpolation=None)
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    keywords=cfg["keywords"],
    author=cfg["author"],
    license_expression="Apache-2.0",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=[f"{cfg['lib_name']}*"]),
    include_package_data=False,  # else the folders of weights are taken for packages
    package_data={cfg["lib_name"]: ["py.typed", "testbed/weights/**/*", "explorer_page/*", "paper_words/*"]},
    project_urls=dict(line.split("=", 1) for line in cfg["project_urls"].split()),
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Framework :: Jupyter",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: {version}" for version in cfg["pythons"].split()),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={
        name: cfg[f"{name}_requirements"].split()
        for name in ("dev", "data", "eval", "slurm", "hpsv2", "site", "browser")
    },
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "nbdev": [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"],
    },
)
