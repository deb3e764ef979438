"Package metadata, read from settings.ini so that it is written down once."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).resolve().parent
ini = ConfigParser(delimiters=["="])
ini.read(here/"settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
end = "_requirements"
extras = {k.removesuffix(end): cfg[k].split() for k in cfg if k.endswith(end)}
scripts = [s for s in cfg["console_scripts"].splitlines() if s]

setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"],
    author=cfg["author"], author_email=cfg["author_email"], license="Apache-2.0",
    keywords=cfg["keywords"], url=cfg["git_url"],
    long_description=(here/"README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["bicl", "bicl.*"]),
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(), extras_require=extras,
    entry_points={"console_scripts": scripts, "nbdev": ["bicl=bicl._modidx:d"]},
    zip_safe=False,
)
