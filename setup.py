"Package metadata, read from settings.ini so that it is written down once."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).resolve().parent
ini = ConfigParser(delimiters=["="])
ini.read(here/"settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
end = "_requirements"
extras = {k.removesuffix(end): cfg[k].split() for k in cfg if k.endswith(end)}
scripts = [s for s in cfg["console_scripts"].splitlines() if s]


class Build(build_py):
    "The package, with those files of nbs/ inside of it that its commands need where there is no checkout."
    def run(self):
        super().run()
        if self.editable_mode: return # the checkout itself is used
        for path in (p for pattern in cfg["package_files"].split() for p in sorted(here.glob(pattern))):
            target = Path(self.build_lib, cfg["lib_name"], path.relative_to(here))
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))


setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"],
    author=cfg["author"], author_email=cfg["author_email"], license="Apache-2.0",
    keywords=cfg["keywords"], url=cfg["git_url"],
    project_urls={"Documentation": cfg["doc_host"] + cfg["doc_baseurl"], "Paper": cfg["paper_url"],
                  "Changelog": cfg["git_url"] + "/blob/main/CHANGELOG.md"},
    long_description=(here/"README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["bicl", "bicl.*"]), cmdclass={"build_py": Build},
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(), extras_require=extras,
    entry_points={"console_scripts": scripts, "nbdev": ["bicl=bicl._modidx:d"]},
    zip_safe=False,
)
