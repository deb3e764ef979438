"""Write into presets.yaml what the searches have found: of each method, benchmark and memory the setting with the largest RA.

    python nbs/experiments/choose_presets.py search BiCL ER          # by this search, of these methods
    python nbs/experiments/choose_presets.py search --one BiCL ER    # one setting for all columns, as grids/one.yaml

The searches must be on streams in tuning mode. Rotations over 0–180° are not searched and take those of 0–90°;
streams of classes whose task is told take those of the same stream without it.
"""
import json, re, sys
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pandas as pd

from bicl.core import atomic, load_yaml
from bicl.jobs import load_grid
from bicl.learner import find_method, make_settings
from bicl.metrics import best_everywhere
from bicl.tables import collect

HERE = Path(__file__).resolve().parent
SAME = {'mnist-rotations-180': 'mnist-rotations', # benchmark → the one whose settings it takes
        'mnist-split-task': 'mnist-split', 'fashion-split-task': 'fashion-split'}
ENTRY = r'^{}:([^\n]*)\n(?:^[ #][^\n]*\n)*' # of a method, in presets.yaml; its first line tells the searches

@cache
def results(grid:str, rows=None):
    "Mean RA and settings of every run of a search."
    grid = load_grid(grid)
    study = collect(grid, rows or HERE.parents[1]/'reports'/grid.name)
    if len(study.rows) and not study.rows.tuning.all(): raise ValueError(f'{grid.name} has tested on reported images')
    used = study.rows.drop_duplicates('stamp').set_index('stamp').settings.map(json.loads)
    RA = study.values[study.values.metric == 'RA']
    mean = RA.groupby(['method', 'benchmark', 'memory', 'stamp'], sort=False, dropna=False).value.mean().reset_index()
    return mean.assign(settings=mean.stamp.map(used))

def differing(method:str, settings:dict)->dict:
    "What differs from the method's defaults."
    default = json.loads(json.dumps(asdict(make_settings(find_method(method), {}))))
    return {k: settings[k] for k, v in default.items() if k != 'memory' and settings[k] != v}

def found(grid:str, method:str, rows=None)->dict: # benchmark → memory → settings that differ from the defaults
    "The winners of a search; without a level for the memory if the method has none."
    mean, out = results(grid, rows), {}
    for (b, m), part in mean[mean.method == method].groupby(['benchmark', 'memory'], sort=False, dropna=False):
        won = differing(method, part.loc[part.value.idxmax()].settings)
        if pd.isna(m): out[b] = won
        else: out.setdefault(b, {})[int(m)] = won
    for b, other in SAME.items():
        if other in out: out[b] = out[other]
    return out

def common(grid:str, method:str, rows=None)->dict: # settings that differ from the defaults
    "Of the settings that a search has tried in every column, the one with the largest mean RA."
    mean = results(grid, rows)
    mean = mean[mean.method == method]
    return json.loads(best_everywhere(mean.assign(setting=mean.settings.map(lambda s: json.dumps(differing(method, s)))))[0])

ONE = '''# One setting for all columns: of those that `{grid}` has tried in every column, the best on average. Written by choose_presets.py.
title: One setting for all columns
seeds: [0, 1, 2, 3, 4]
benchmark: [mnist-rotations, mnist-permutations, fashion-permutations, notmnist-permutations]
memory: [200, 500, 5120]
protocol: buffered
preset: false
settings: {{stream.test: new}}
runs:
'''

def one(grid:str, *methods:str)->str:
    "A grid that runs each method with one setting in all columns."
    return ONE.format(grid=grid) + ''.join(f'- {{method: {m}, settings: {flow(common(grid, m))}}}\n' for m in methods)

def by_memory(entry:dict)->bool: return bool(entry) and all(isinstance(m, int) for m in entry)

def joined(old:dict, new:dict)->dict: # benchmark → settings, or memory → settings
    "The entries of a method: new ones beside old ones, also of single memories."
    return old | {b: old[b] | v if by_memory(v) and by_memory(old.get(b)) else v for b, v in new.items()}

flow = lambda d: '{' + ', '.join(f'{k}: {json.dumps(v)}' for k, v in d.items()) + '}'

def block(method:str, entries:dict, searches)->str:
    "The entry of a method, as YAML."
    text = f'{method}: # by choose_presets.py: {", ".join(sorted(searches))}\n'
    for b, found in entries.items():
        if by_memory(found): text += f'  {b}:\n' + ''.join(f'    {m}: {flow(d)}\n' for m, d in sorted(found.items()))
        else: text += f'  {b}: {flow(found)}\n'
    return text

def searched(text:str, method:str)->set:
    "The searches that have written the entry of a method."
    told = re.search(ENTRY.format(re.escape(method)), text, re.M)
    return set(re.findall(r'search\w*', told[1])) if told else set()

def main(grid:str, *methods:str):
    path = HERE/'presets.yaml'
    if methods[:1] == ('--one',):
        with atomic(HERE/'grids'/'one.yaml') as f: f.write(one(grid, *methods[1:]))
        return
    for m in methods:
        text, old = path.read_text(encoding='utf-8'), (load_yaml(path) or {}).get(m) or {}
        if not (new := found(grid, m)): raise SystemExit(f'{grid} has no rows of {m}')
        entry, rest = block(m, joined(old, new), searched(text, m) | {grid}), re.compile(ENTRY.format(re.escape(m)), re.M)
        with atomic(path) as f: f.write(rest.sub(lambda _, e=entry: e, text) if m in (load_yaml(path) or {}) else text + entry)

if __name__ == '__main__': main(*sys.argv[1:])
