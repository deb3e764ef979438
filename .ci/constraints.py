"""Versions that are known to work together.

    python .ci/constraints.py > .ci/constraints.txt      those of this environment: CI installs them
    python .ci/constraints.py --lowest > build/lowest.txt      the oldest that settings.ini allows

torch and what belongs to it are left out: an exact pin can resolve to a build that torchvision does not fit.
"""
import re, sys
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FREE = re.compile('torch|torchvision|triton|nvidia-.*|cuda-.*') # nothing is said of these

def asked():
    "All requirements of settings.ini but those of `make bench`."
    ini = ConfigParser(delimiters=['='])
    ini.read(Path(__file__).resolve().parent.parent/'settings.ini', encoding='utf-8')
    keys = 'requirements', 'dev_requirements', 'dask_requirements'
    return [Requirement(r) for k in keys for r in ini['DEFAULT'][k].split()]

def installed():
    "Name and version of what settings.ini asks for, and of what that asks for in turn."
    todo, found = [(r.name, r.extras) for r in asked()], {}
    while todo:
        name, extras = todo.pop()
        if (name := canonicalize_name(name)) in found or FREE.fullmatch(name): continue
        try: d = distribution(name)
        except PackageNotFoundError: continue # for other systems
        found[name] = d.version
        for r in map(Requirement, d.requires or ()):
            if not r.marker or any(r.marker.evaluate(dict(extra=e)) for e in ('', *extras)):
                todo.append((r.name, r.extras))
    return found

def lowest():
    "Name and oldest version that settings.ini allows."
    bounds = {canonicalize_name(r.name): s.version for r in asked() for s in r.specifier
              if s.operator in ('>=', '==')}
    return {n: v for n, v in bounds.items() if not FREE.fullmatch(n)}

if __name__ == '__main__':
    for n, v in sorted((lowest() if '--lowest' in sys.argv else installed()).items()): print(f'{n}=={v}')
