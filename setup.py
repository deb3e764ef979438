"Package metadata, read from settings.ini so that it is written down once."
from configparser import ConfigParser

from setuptools import find_packages, setup

ini = ConfigParser(delimiters=["="])
ini.read("settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
extras = {k.removesuffix("_requirements"): cfg[k].split() for k in cfg if k.endswith("_requirements")}
scripts = [s for s in cfg.get("console_scripts", "").splitlines() if s]

setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"],
    author=cfg["author"], author_email=cfg["author_email"], license="Apache-2.0",
    keywords=cfg["keywords"], url=cfg["git_url"],
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["bicl", "bicl.*"]),
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(), extras_require=extras,
    entry_points={"console_scripts": scripts, "nbdev": [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
    zip_safe=False,
)
