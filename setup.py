"""Give the metadata of settings.ini to setuptools; what is packed stands in pyproject.toml."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def lines(text: str) -> list[str]:
    "Return the entries of a field that has one on each line."
    return [line.strip() for line in text.splitlines() if line.strip()]


def pairs(text: str) -> dict[str, str]:
    "Return the entries `name = value` of a field."
    split = [line.split("=", 1) for line in lines(text)]
    return {name.strip(): value.strip() for name, value in split}


parser = ConfigParser(delimiters=["="], interpolation=None)
parser.read_string((HERE / "settings.ini").read_text(encoding="utf-8"))
settings = parser["DEFAULT"]
suffix = "_requirements"
versions = [
    f"Programming Language :: Python :: {version}" for version in settings["pythons"].split()
]

setup(
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=settings["author"],
    license_expression=settings["license"],
    keywords=settings["keywords"].split(),
    classifiers=sorted(lines(settings["classifiers"]) + versions),
    project_urls=pairs(settings["urls"]),
    python_requires=f">={settings['min_python']}",
    install_requires=lines(settings["requirements"]),
    extras_require={
        key.removesuffix(suffix): lines(settings[key]) for key in settings if key.endswith(suffix)
    },
    entry_points={
        "console_scripts": lines(settings["console_scripts"]),
        "nbdev": lines(settings["nbdev_entry_points"]),
    },
)
